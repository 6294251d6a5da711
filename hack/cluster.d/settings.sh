# shellcheck shell=bash
# Folders, names and addresses for all parts of hack/cluster. Sourced.
# shellcheck disable=SC2034  # used by the scripts that source it
PARTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/rlsrl/cluster
INPUTS=$(cd "$PARTS" && find go pause.c image.py build.sh -type f | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-16)
TOOLS=$CACHE/build-$INPUTS            # the built programs; changed sources get another folder
STATE=$CACHE/state                    # of the running cluster: certificates, etcd, container stores, volumes, logs
FAILED_LOGS=$CACHE/failed-logs        # of the last start that failed
PKI=$STATE/pki
ADMIN=$STATE/admin.kubeconfig
AUDIT_LOG=$STATE/log/audit.log
BRIDGE=rlsrl0
NET=10.77.0                           # the nodes' network: the host is .1, node I is .(10+I)
POD_NET=10.244                        # node I's pods: 10.244.I.0/24
SERVICE_CIDR=10.96.0.0/16
DNS_IP=10.96.0.10                     # as in coredns.yaml
MAX_NODES=9
NUM_VOLUMES=16
SYSCTLS=(kernel.panic kernel.panic_on_oops kernel.keys.root_maxkeys kernel.keys.root_maxbytes
  vm.overcommit_memory vm.panic_on_oom) # a kubelet sets them for the whole machine; `down` restores them

node_ip() { echo "$NET.$((10 + $1))"; }
kubectl() { "$TOOLS/kubectl" --kubeconfig "$ADMIN" --cache-dir "$STATE/kubectl-cache" "$@"; }
fail() { echo "cluster: $*" >&2; exit 1; }

# until_true SECONDS WHAT COMMAND...: wait until the command succeeds; after SECONDS keep the logs and fail with WHAT.
until_true() {
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    if ((SECONDS >= deadline)); then
      keep_logs
      fail "$what: time-out; the logs are in $FAILED_LOGS"
    fi
    sleep 0.1
  done
}

keep_logs() { # copy the logs to where `down` leaves them
  rm -rf "$FAILED_LOGS"
  mkdir -p "$FAILED_LOGS"
  (cd "$STATE" && find . -path '*/log/*' -type f -exec cp --parents {} "$FAILED_LOGS" \;) || true
  kubectl --request-timeout=10s get nodes,pods -A -o wide >"$FAILED_LOGS/objects.txt" 2>&1 || true
}

NODE_GRACE=${RLSRL_CLUSTER_NODE_GRACE:-50s} # a node's silence until it is NotReady; Kubernetes' default
[[ $NODE_GRACE =~ ^[1-9][0-9]*s$ ]] || fail "RLSRL_CLUSTER_NODE_GRACE: $NODE_GRACE; allowed: seconds, for example 10s"
# The settings of the running cluster: NUM_NODES and NODE_GRACE.
# shellcheck source=/dev/null
[[ ! -e $STATE/settings.sh ]] || . "$STATE/settings.sh"
