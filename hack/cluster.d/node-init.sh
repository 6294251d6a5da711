#!/usr/bin/env bash
# node-init.sh I: PID 1 of node I, in its own mount, network, PID, UTS and IPC namespaces. Killing this process kills the
# node with its kubelet and every container, like a power loss.
# It waits for its network link, then for the API server, and runs until it is killed.
set -uo pipefail
# shellcheck source-path=SCRIPTDIR source=settings.sh
. "$(dirname "$0")/settings.sh"
# shellcheck source-path=SCRIPTDIR source=store.sh
. "$PARTS/store.sh"
# shellcheck source-path=SCRIPTDIR source=control-plane.sh
. "$PARTS/control-plane.sh"
i=$1
name=node-$i ip=$(node_ip "$1") own=$STATE/node-$1

rest() { while :; do sleep 3600 & wait $!; done; } # the shell reaps the orphans of containers, as PID 1 must

private_mounts() { # give the node its own /run and /var: CNI, kubelet and logs use fixed paths below /var
  mount --make-rprivate /
  mount -t tmpfs -o mode=755 tmpfs /run
  mkdir -p /run/{lock,netns,cni,cache,var,work} "$own"/{kubelet,log,pod-logs}
  mount --bind "$CACHE" /run/cache # the cache may be below /var
  mount -t overlay -o lowerdir=/var,upperdir=/run/var,workdir=/run/work overlay /var
  mount --bind /run/cache "$CACHE"
  mkdir -p /var/log/{pods,containers}
  mount --bind "$own/pod-logs" /var/log/pods
  mount --make-rshared /
  : >/run/resolv.conf # CoreDNS has no upstream server
}

network() {
  local j
  hostname "$name"
  ip link set lo up
  until_true "$START_SECONDS" "$name has its link" ip link show eth0
  ip addr add "$ip/24" dev eth0
  ip link set eth0 up
  ip route add default via "$NET.1"
  sysctl -qw net.ipv4.ip_forward=1
  for j in $(seq "$NUM_NODES"); do
    [[ $j == "$i" ]] || ip route replace "$POD_NET.$j.0/24" via "$(node_ip "$j")"
  done
}

containers() {
  cat >/run/cni/10-bridge.conflist <<JSON
{"cniVersion": "1.0.0", "name": "rlsrl", "plugins": [
 {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
  "ipam": {"type": "host-local", "dataDir": "/run/cni/ipam", "ranges": [[{"subnet": "$POD_NET.$i.0/24"}]],
           "routes": [{"dst": "0.0.0.0/0"}]}},
 {"type": "portmap", "capabilities": {"portMappings": true}}]}
JSON
  copy_store "$own/containerd"
  containerd_config "$own/containerd" /run/containerd >/run/containerd.toml
  # restrict_oom_score_adj: root in a container or sandbox may lack CAP_SYS_RESOURCE.
  cat >>/run/containerd.toml <<TOML
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "localhost/pause:3.10"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/run/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
TOML
  containerd -c /run/containerd.toml >>"$own/log/containerd.log" 2>&1 &
  until_true "$START_SECONDS" "containerd of $name answers" ctr version
}

cgroups() { # create the kubelet's cgroup root; with cgroup v1, in every controller
  local controller
  for controller in cpu cpuacct cpuset memory devices freezer blkio pids systemd; do
    [[ ! -d /sys/fs/cgroup/$controller ]] || mkdir -p "/sys/fs/cgroup/$controller/rlsrl-$name"
  done
  if [[ ! -d /sys/fs/cgroup/cpuset ]]; then
    echo '+cpuset +cpu +io +memory +pids' >/sys/fs/cgroup/cgroup.subtree_control
    mkdir -p "/sys/fs/cgroup/rlsrl-$name"
    return
  fi
  cat /sys/fs/cgroup/cpuset/cpuset.cpus >"/sys/fs/cgroup/cpuset/rlsrl-$name/cpuset.cpus"
  cat /sys/fs/cgroup/cpuset/cpuset.mems >"/sys/fs/cgroup/cpuset/rlsrl-$name/cpuset.mems"
}

kubelet() {
  cat >/run/kubelet.yaml <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
failSwapOn: false
cgroupDriver: cgroupfs
cgroupRoot: /rlsrl-$name
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
address: $ip
clusterDNS: [$DNS_IP]
clusterDomain: cluster.local
resolvConf: /run/resolv.conf
podCIDR: $POD_NET.$i.0/24
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $PKI/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $PKI/$name.crt
tlsPrivateKeyFile: $PKI/$name.key
syncFrequency: 10s
nodeStatusUpdateFrequency: 2s
volumePluginDir: /run/kubelet-volume-plugins
imageMaximumGCAge: 0s
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 100Mi, nodefs.available: 1Gi, imagefs.available: 1Gi}
YAML
  "$TOOLS/kubelet" --config /run/kubelet.yaml --kubeconfig "$PKI/$name.kubeconfig" --root-dir "$own/kubelet" \
    --hostname-override "$name" --node-ip "$ip" >>"$own/log/kubelet.log" 2>&1 &
}

proxy() {
  cat >/run/proxy.yaml <<YAML
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
clientConnection: {kubeconfig: $PKI/kube-proxy.kubeconfig}
clusterCIDR: $POD_NET.0.0/16
bindAddress: $ip
healthzBindAddress: 127.0.0.1:10256
metricsBindAddress: 127.0.0.1:10249
conntrack: {maxPerCore: 0}
YAML
  "$TOOLS/kube-proxy" --config /run/proxy.yaml --hostname-override "$name" >>"$own/log/kube-proxy.log" 2>&1 &
}

private_mounts
network
if [[ $i == 1 ]]; then
  start_etcd
  start_apiserver
  start_controllers
  recycle_volumes &
fi
((NUM_NODES > 0)) || rest
containers
cgroups
until_true "$START_SECONDS" 'the API server is ready' kubectl get --raw /readyz
kubelet
proxy
rest
