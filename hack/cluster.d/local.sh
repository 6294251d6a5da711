# shellcheck shell=bash
# The backend `local`: a cluster of real nodes on this machine, without an engine and without a registry. Sourced by
# hack/cluster, which calls the functions by the names of its commands. A node is a process tree in namespaces of its own
# (node-init.sh); node 1 also runs the control plane. The host gets one bridge, its links and routes, all taken by `down`.

PACKAGES=(containerd runc containernetworking-plugins iptables nftables conntrack socat ebtables ethtool iproute2 openssl)

prepare() { # root, Debian's packages, the build
  [[ $(id -u) == 0 ]] || fail 'the backend local makes namespaces and a bridge: run it as root'
  if ! type containerd runc conntrack socat iptables openssl ip >/dev/null 2>&1 || [[ ! -x /usr/lib/cni/bridge ]]; then
    command -v apt-get >/dev/null || fail "no apt-get here: install these yourself: ${PACKAGES[*]}"
    echo "cluster: installing ${PACKAGES[*]}" >&2
    apt-get update --quiet --quiet
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --quiet --no-install-recommends "${PACKAGES[@]}" >/dev/null
  fi
  "$PARTS/build.sh"
}

node_pid() { # prints the PID of node I's init, as the host numbers it, while it lives
  local pid
  pid=$(cat "$STATE/node-$1/pid" 2>/dev/null) && tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q node-init.sh && echo "$pid"
}

require_node() { # require_node WORD: it is one of the cluster's nodes
  local known
  known=$(find "$STATE" -maxdepth 1 -name 'node-*' -printf '%f\n' 2>/dev/null | sed 's/node-//' | sort -n | paste -sd ' ')
  [[ -n $known ]] || fail 'no cluster is up: hack/cluster up N'
  [[ " $known " == *" $1 "* ]] || fail "node: $1 is none of this cluster's nodes; allowed: $known"
}

inside() { # inside I COMMAND...: runs it in node I
  local pid
  pid=$(node_pid "$1") || fail "node $1 is down: hack/cluster node-up $1"
  shift
  nsenter -t "$pid" -m -n -p -u -i -- "$@"
}

start_node() { # start_node I NODES KUBELET
  local outer pid=
  mkdir -p "$STATE/node-$1"
  setsid unshare --mount --net --pid --uts --ipc --fork --mount-proc --kill-child \
    "$PARTS/node-init.sh" "$@" >>"$STATE/node-$1/init.log" 2>&1 </dev/null &
  outer=$!
  until pid=$(pgrep -P "$outer") && [[ -n $pid ]]; do
    kill -0 "$outer" 2>/dev/null || fail "node $1 did not start; see $STATE/node-$1/init.log"
    sleep 0.02
  done
  echo "$pid" >"$STATE/node-$1/pid"
  ip link del "rlsrl-v$1" 2>/dev/null || true
  ip link add "rlsrl-v$1" type veth peer name "rlsrl-p$1"
  ip link set "rlsrl-v$1" master "$BRIDGE" up
  ip link set "rlsrl-p$1" netns "$pid" name eth0
}

kill_node() { # as a power loss; idempotent
  local pid group
  if pid=$(node_pid "$1"); then
    kill -9 "$pid"
    until_true 30 "node $1 is gone" test ! -d "/proc/$pid"
  fi
  rm -f "$STATE/node-$1/pid"
  for group in /sys/fs/cgroup/*/rlsrl-node-"$1" /sys/fs/cgroup/rlsrl-node-"$1"; do
    [[ ! -d $group ]] || until_true 10 "$group is empty" remove_group "$group"
  done
}

remove_group() { find "$1" -depth -type d -exec rmdir {} +; }

volumes() { # hostPath volumes: the nodes share this machine's disk, so one follows its pod from node to node
  local i
  for i in $(seq "$NUM_VOLUMES"); do
    mkdir -p "$STATE/volumes/$i"
    chmod 0777 "$STATE/volumes/$i" # a kubelet gives no hostPath to the pod's group
    cat <<YAML
apiVersion: v1
kind: PersistentVolume
metadata: {name: standard-$i}
spec:
  capacity: {storage: 10Gi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: standard
  hostPath: {path: $STATE/volumes/$i}
---
YAML
  done
}

nodes_ready() { [[ $(kubectl get nodes --no-headers | grep -cw Ready) == "$1" ]]; }

up() {
  local n=$1 count=$1 with_kubelet=yes i
  [[ ! -d $STATE ]] || fail 'a cluster is up already (or one was not taken down): hack/cluster down first'
  prepare
  ((n > 0)) || count=1 with_kubelet=no
  mkdir -p "$STATE/log" "$STATE/etcd"
  chmod 700 "$STATE/etcd"
  "$PARTS/pki.sh" "$count" 2>"$STATE/log/pki.log"
  sysctl "${SYSCTLS[@]}" >"$STATE/sysctls"
  ip link add "$BRIDGE" type bridge
  ip addr add "$NET.1/24" dev "$BRIDGE"
  ip link set "$BRIDGE" up
  for i in $(seq "$count"); do start_node "$i" "$count" "$with_kubelet"; done
  until_true 120 'the API server is ready' kubectl get --raw /readyz
  for i in $(seq "$count"); do ip route replace "$POD_NET.$i.0/24" via "$(node_ip "$i")"; done
  until_true 60 'the controllers run' kubectl -n default get serviceaccount default
  volumes | kubectl apply -f - >/dev/null
  if ((n > 0)); then
    kubectl apply -f "$PARTS/coredns.yaml" >/dev/null
    until_true 120 "$n nodes are Ready" nodes_ready "$n"
    kubectl -n kube-system rollout status deployment/coredns --timeout=120s >/dev/null
  fi
}

down() {
  local folder
  [[ $(id -u) == 0 ]] || fail 'the backend local is taken down by root'
  for folder in "$STATE"/node-*; do
    [[ ! -d $folder ]] || kill_node "${folder##*/node-}"
  done
  for folder in /sys/class/net/rlsrl-v*; do
    [[ ! -e $folder ]] || ip link del "${folder##*/}" 2>/dev/null || true # its end in a killed node takes it too
  done
  ip link del "$BRIDGE" 2>/dev/null || true
  [[ ! -e $STATE/sysctls ]] || sysctl -qp "$STATE/sysctls"
  rm -rf "$STATE"
}

load() { # load IMAGE...: from the engine's store, or from an archive NAME.tar, into every node that is up
  local image folder
  for image in "$@"; do
    for folder in "$STATE"/node-*; do
      [[ -d $folder ]] || fail 'no cluster is up: hack/cluster up N'
      if [[ -f $image ]]; then cat "$image"; else docker save "$image"; fi |
        inside "${folder##*/node-}" ctr -n k8s.io images import - >/dev/null
    done
  done
}

kubeconfig() {
  [[ -e $ADMIN ]] || fail 'no cluster is up: hack/cluster up N'
  echo "$ADMIN"
}

tools() { prepare && echo "$TOOLS"; }
node-kill() { require_node "$1" && kill_node "$1"; }
node-cut() { require_node "$1" && ip link set "rlsrl-v$1" down; }
node-heal() { require_node "$1" && ip link set "rlsrl-v$1" up; }

node-up() {
  require_node "$1"
  ! node_pid "$1" >/dev/null || fail "node $1 is up already"
  start_node "$1" "$(find "$STATE" -maxdepth 1 -name 'node-*' | wc -l)" yes
}

# The API server is stopped as by a crash of its process; etcd and the rest of node 1 go on.
api-stop() { require_node 1 && inside 1 kill -9 "$(cat "$STATE/kube-apiserver.pid")"; }
api-start() {
  require_node 1
  # shellcheck disable=SC2016  # expanded inside the node
  inside 1 setsid bash -c '. "$1/settings.sh"; . "$1/control-plane.sh"; start_apiserver' - "$PARTS" </dev/null
  until_true 60 'the API server is ready' kubectl get --raw /readyz
}
