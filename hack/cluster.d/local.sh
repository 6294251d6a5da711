# shellcheck shell=bash
# The backend `local`: a cluster of real nodes on this machine, without a container engine or a registry. Sourced by
# hack/cluster, which calls the functions by the names of its commands. A node is a process tree in its own namespaces
# (node-init.sh); node 1 also runs the control plane. `up` adds one bridge, its links and routes to the host; `down` removes
# them.

# shellcheck source-path=SCRIPTDIR source=store.sh
. "$PARTS/store.sh"
PACKAGES=(containerd runc containernetworking-plugins iptables iproute2 openssl procps python3 gcc libc6-dev)

prepare() { # check for root, install Debian's packages, build Kubernetes
  [[ $(id -u) == 0 ]] || fail 'the backend local creates network namespaces and a bridge: run it as root'
  if ! type containerd runc iptables ip openssl pgrep python3 gcc >/dev/null 2>&1 || [[ ! -x /usr/lib/cni/bridge ]]; then
    command -v apt-get >/dev/null || fail "apt-get is missing: install these packages: ${PACKAGES[*]}"
    echo "cluster: installing ${PACKAGES[*]}" >&2
    apt-get update --quiet --quiet
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --quiet --no-install-recommends --no-upgrade \
      "${PACKAGES[@]}" >/dev/null
  fi
  "$PARTS/build.sh"
}

nodes() { find "$STATE" -maxdepth 1 -name 'node-*' -printf '%f\n' 2>/dev/null | sed 's/node-//' | sort -n; }

node_pid() { # node_pid I: print the host's PID of node I's init; fail if the node is down
  pgrep --parent "$(cat "$STATE/node-$1/unshare.pid" 2>/dev/null)" --full node-init.sh 2>/dev/null
}

require_node() { # require_node WORD: fail unless WORD is the number of a node of the cluster
  local known
  known=$(nodes | paste -sd ' ')
  [[ -n $known ]] || fail 'no cluster is up: hack/cluster up N'
  [[ " $known " == *" $1 "* ]] || fail "node: $1 is not a node of this cluster; allowed: $known"
}

inside() { # inside I COMMAND...: run the command in node I
  local pid
  pid=$(node_pid "$1") || fail "node $1 is down: hack/cluster node-up $1"
  shift
  nsenter -t "$pid" -m -n -p -u -i -- "$@"
}

start_node() {
  local pid
  mkdir -p "$STATE/node-$1"
  setsid unshare --mount --net --pid --uts --ipc --fork --mount-proc --kill-child \
    "$PARTS/node-init.sh" "$1" >>"$STATE/node-$1/init.log" 2>&1 </dev/null 7>&- &
  echo $! >"$STATE/node-$1/unshare.pid"
  until_true 30 "node $1 has begun" node_pid "$1"
  pid=$(node_pid "$1")
  ip link del "rlsrl-v$1" 2>/dev/null || true
  ip link add "rlsrl-v$1" type veth peer name "rlsrl-p$1"
  ip link set "rlsrl-v$1" master "$BRIDGE" up
  ip link set "rlsrl-p$1" netns "$pid" name eth0
}

kill_node() { # kill_node I: as a power loss does; may be repeated
  local pid group
  if pid=$(node_pid "$1"); then
    kill -9 "$pid"
    until_true 30 "node $1 is gone" test ! -d "/proc/$pid"
  fi
  for group in /sys/fs/cgroup/*/rlsrl-node-"$1" /sys/fs/cgroup/rlsrl-node-"$1"; do
    [[ ! -d $group ]] || until_true 10 "$group is empty" remove_group "$group"
  done
}

remove_group() { find "$1" -depth -type d -exec rmdir {} +; }

volumes() { # print hostPath volumes; the nodes share this machine's disk, so a volume is usable on every node
  local i
  cat <<YAML
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: standard, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: WaitForFirstConsumer
YAML
  for i in $(seq "$NUM_VOLUMES"); do
    mkdir -p "$STATE/volumes/$i"
    chmod 0777 "$STATE/volumes/$i" # a kubelet does not change the group of a hostPath volume to the pod's
    cat <<YAML
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: standard-$i}
spec:
  capacity: {storage: 10Gi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: standard
  hostPath: {path: $STATE/volumes/$i}
YAML
  done
}

nodes_ready() { [[ $(kubectl get nodes --no-headers | grep -cw Ready) == "$1" ]]; }

require_none() { # fail if a node lives; else remove what a killed cluster left
  local i
  [[ -d $STATE ]] || return 0
  for i in $(nodes); do
    ! node_pid "$i" >/dev/null || fail 'a cluster is up already: hack/cluster down first'
  done
  echo 'cluster: removing the remains of a cluster whose nodes are all down' >&2
  down
}

up() {
  local i all
  prepare
  exec 7>"$CACHE/cluster.lock" # held until the cluster is up; its nodes close it
  flock 7
  require_none
  find "$CACHE" -maxdepth 1 -name 'build-*' ! -path "$TOOLS" -exec rm -rf {} + # builds of earlier sources
  all=$(seq $(($1 > 0 ? $1 : 1)))
  mkdir -p "$STATE/log" "$STATE/etcd"
  chmod 700 "$STATE/etcd"
  printf 'NUM_NODES=%s\nNODE_GRACE=%s\n' "$1" "$NODE_GRACE" >"$STATE/settings.sh"
  "$PARTS/pki.sh" "$all" 2>"$STATE/log/pki.log"
  sysctl "${SYSCTLS[@]}" >"$STATE/sysctls"
  ip link add "$BRIDGE" type bridge
  ip addr add "$NET.1/24" dev "$BRIDGE"
  ip link set "$BRIDGE" up
  for i in $all; do start_node "$i"; done
  until_true "$START_SECONDS" 'the API server is ready' kubectl get --raw /readyz
  for i in $all; do ip route replace "$POD_NET.$i.0/24" via "$(node_ip "$i")"; done
  until_true "$START_SECONDS" 'the controllers run' kubectl -n default get serviceaccount default
  volumes | kubectl apply -f - >/dev/null
  (($1 > 0)) || return 0
  until_true "$START_SECONDS" "$1 nodes are Ready" nodes_ready "$1"
  kubectl apply -f "$PARTS/coredns.yaml" >/dev/null # now: with one node Ready, both pods would be there
  until_true "$START_SECONDS" 'CoreDNS is ready' kubectl -n kube-system rollout status deployment/coredns --timeout=10s
}

down() {
  local i
  [[ $(id -u) == 0 ]] || fail 'the backend local needs root: run hack/cluster down as root'
  for i in $(nodes); do
    kill_node "$i"
    ip link del "rlsrl-v$i" 2>/dev/null || true # the kernel removes it with the killed node's end
  done
  ip link del "$BRIDGE" 2>/dev/null || true
  [[ ! -e $STATE/sysctls ]] || sysctl -qp "$STATE/sysctls"
  rm -rf --one-file-system "$STATE"
}

load() { # load into the store and the running nodes; a stopped node copies the store at its next start
  local image i archives=() imports=() status=0
  prepare
  WORK=$(mktemp -d "$CACHE/load.XXXXXX")
  trap 'rm -rf "$WORK"' EXIT
  for image in "$@"; do
    archives+=("$image")
    [[ ! -e $image && $image != *.tar ]] || continue
    archives[-1]=$WORK/${#archives[@]}.tar
    docker save --output "${archives[-1]}" "$image" >/dev/null ||
      fail "image: $image is neither an archive (NAME.tar) nor an image in docker's store"
  done
  for image in "${archives[@]}"; do "$PARTS/archive.py" names "$image" >/dev/null; done
  with_store import "${archives[@]}" &
  imports+=($!)
  for i in $(nodes); do
    if ! node_pid "$i" >/dev/null; then
      rm -rf "$STATE/node-$i/containerd"
    elif ((NUM_NODES > 0)); then
      CONTAINERD_ADDRESS=/proc/$(node_pid "$i")/root/run/containerd/containerd.sock import "${archives[@]}" &
      imports+=($!)
    fi
  done
  for i in "${imports[@]}"; do wait "$i" || status=1; done
  return "$status"
}

tools() {
  prepare
  echo "$TOOLS"
}

node-kill() {
  require_node "$1"
  kill_node "$1"
}

node-cut() {
  require_node "$1"
  ip link set "rlsrl-v$1" down
}

node-heal() {
  require_node "$1"
  ip link set "rlsrl-v$1" up
}

node-up() {
  require_node "$1"
  ! node_pid "$1" >/dev/null || fail "node $1 is up already"
  start_node "$1"
}

apiserver_lives() { # checked in node 1: the file has the PID of its PID namespace
  # shellcheck disable=SC2016  # expanded inside the node
  inside 1 bash -c 'tr "\0" " " <"/proc/$(cat "$1")/cmdline" | grep -q kube-apiserver' - "$STATE/kube-apiserver.pid" 2>/dev/null
}

# Kill the API server, as in a crash; etcd and the rest of node 1 continue.
api-stop() {
  require_node 1
  apiserver_lives || fail 'the API server is down already'
  inside 1 kill -9 "$(cat "$STATE/kube-apiserver.pid")"
}

api-start() {
  require_node 1
  ! apiserver_lives || fail 'the API server is up already'
  # shellcheck disable=SC2016  # expanded inside the node
  inside 1 setsid bash -c '. "$1/settings.sh"; . "$1/control-plane.sh"; start_apiserver' - "$PARTS" </dev/null
  until_true "$START_SECONDS" 'the API server is ready' kubectl get --raw /readyz
}
