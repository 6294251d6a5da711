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
START_SECONDS=300                     # for each part to start; usually seconds, but a start of CI's once took more than two minutes
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
    sleep 0.5 # up to four wait for the API server at a time, and a call of kubectl takes a tenth of a second or more of a core
  done
}

# Copy the logs to where `down` leaves them, and print the last error of each: CI's machine is gone with its files.
keep_logs() {
  local log
  rm -rf "$FAILED_LOGS"
  mkdir -p "$FAILED_LOGS"
  (cd "$STATE" && find . \( -path '*/log/*' -o -name init.log \) -type f -exec cp --parents {} "$FAILED_LOGS" \;) || true
  kubectl --request-timeout=10s get nodes,pods -A -o wide >"$FAILED_LOGS/objects.txt" 2>&1 || true
  for log in $(cd "$FAILED_LOGS" && find . -name '*.log' -size +0 ! -path "*/${AUDIT_LOG##*/}" | sort); do
    echo "cluster: ${log#./}: $({ grep -aE '^[EF][0-9]{4} |level=(error|fatal)' "$FAILED_LOGS/$log" || cat "$FAILED_LOGS/$log"; } |
      tail -n 1 | cut -c1-300)"
  done >&2
  kubectl --request-timeout=10s get nodes >&2 -o jsonpath='{range .items[*]}cluster: {.metadata.name}: '\
'{.status.conditions[?(@.type=="Ready")].message}{"\n"}{end}' || true
}

NODE_GRACE=${RLSRL_CLUSTER_NODE_GRACE:-50s} # a node's silence until it is NotReady; Kubernetes' default
[[ $NODE_GRACE =~ ^[1-9][0-9]*s$ ]] || fail "RLSRL_CLUSTER_NODE_GRACE: $NODE_GRACE; allowed: seconds, for example 10s"
# The settings of the running cluster: NUM_NODES and NODE_GRACE.
# shellcheck source=/dev/null
[[ ! -e $STATE/settings.sh ]] || . "$STATE/settings.sh"
