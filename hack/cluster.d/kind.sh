# shellcheck shell=bash
# The backend `kind` (https://kind.sigs.k8s.io): the nodes are containers of a docker engine, for a workstation or a CI
# service. Sourced by hack/cluster, which calls the functions by the names of its commands. Differences from `local`: a
# claim's volume stays on its node, and NetworkPolicies are enforced.

CLUSTER=rlsrl
NODE_IMAGE=kindest/node:v1.35.0 # of the minor version that go.mod pins for `local`
MANIFESTS=/etc/kubernetes/manifests

container() { # container I: print kind's name of node I; node 1 also runs the control plane
  case $1 in
    1) echo "$CLUSTER-control-plane" ;;
    2) echo "$CLUSTER-worker" ;;
    *) echo "$CLUSTER-worker$(($1 - 1))" ;;
  esac
}

require_node() { # require_node WORD: print the container of node WORD, or fail
  local known
  known=$(kind get nodes --name "$CLUSTER" 2>/dev/null)
  [[ -n $known ]] || fail 'no cluster is up: hack/cluster up N'
  grep -x "$(container "$1")" <<<"$known" || fail "node: $1 is not a node of this cluster; allowed: 1 to $(wc -l <<<"$known")"
}

configuration() { # configuration N: print kind's configuration of N nodes
  local i
  cat <<YAML
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes:
- role: control-plane
  extraMounts:
  - {hostPath: "$PARTS/audit-policy.yaml", containerPath: /etc/rlsrl/audit-policy.yaml, readOnly: true}
  - {hostPath: "$STATE/log", containerPath: /var/log/rlsrl}
  kubeadmConfigPatches:
  - |
    kind: InitConfiguration
    nodeRegistration: {taints: []}
  - |
    kind: ClusterConfiguration
    apiServer:
      extraArgs:
        audit-policy-file: /etc/rlsrl/audit-policy.yaml
        audit-log-path: /var/log/rlsrl/${AUDIT_LOG##*/}
        audit-log-maxsize: "4096"
      extraVolumes:
      - {name: audit-policy, hostPath: /etc/rlsrl, mountPath: /etc/rlsrl, readOnly: true, pathType: Directory}
      - {name: audit-log, hostPath: /var/log/rlsrl, mountPath: /var/log/rlsrl, pathType: Directory}
    controllerManager:
      extraArgs: {node-monitor-grace-period: $NODE_GRACE}
YAML
  for ((i = 2; i <= $1; i++)); do echo '- role: worker'; done
}

kubectl() { command kubectl --kubeconfig "$ADMIN" "$@"; }

up() {
  local up
  type docker kind kubectl helm >/dev/null || fail 'the backend kind needs these on the PATH: docker kind kubectl helm'
  up=$(kind get nodes --name "$CLUSTER" 2>/dev/null)
  [[ -z $up ]] || fail 'a cluster is up already: hack/cluster down first'
  rm -rf --one-file-system "$STATE" # left by a cluster whose containers are gone
  mkdir -p "$STATE/log"
  : >"$AUDIT_LOG" # else the API server creates it, readable only by root
  configuration "$1" | kind create cluster --name "$CLUSTER" --image "$NODE_IMAGE" --kubeconfig "$ADMIN" --wait 180s --config -
  (($1 > 0)) || kubectl cordon "$(container 1)"
}

down() {
  kind delete cluster --name "$CLUSTER"
  rm -rf --one-file-system "$STATE"
}

load() {
  local image
  for image in "$@"; do
    if [[ $image == *.tar ]]; then
      kind load image-archive --name "$CLUSTER" "$image"
    else
      kind load docker-image --name "$CLUSTER" "$image"
    fi
  done
}

tools() { # print a folder with this machine's kubectl and helm
  mkdir -p "$STATE/tools"
  ln -sf "$(command -v kubectl)" "$(command -v helm)" "$STATE/tools"
  echo "$STATE/tools"
}

# Killed, not paused: a paused node would continue later, unlike after a power loss.
node-kill() { docker kill "$(require_node "$1")" >/dev/null; }
node-up() { docker start "$(require_node "$1")" >/dev/null; }

node-cut() { # store the node's address: node-heal must restore the same one
  local node
  node=$(require_node "$1")
  docker inspect --format '{{.NetworkSettings.Networks.kind.IPAddress}}' "$node" >"$STATE/$node.ip"
  docker network disconnect kind "$node"
}

node-heal() {
  local node
  node=$(require_node "$1")
  docker network connect --ip "$(cat "$STATE/$node.ip")" kind "$node"
}

# The kubelet restarts a killed API server as long as its manifest exists.
api-stop() {
  docker exec "$(require_node 1)" sh -c "mv $MANIFESTS/kube-apiserver.yaml /etc/kubernetes && pkill -9 kube-apiserver"
}

api-start() {
  docker exec "$(require_node 1)" mv /etc/kubernetes/kube-apiserver.yaml "$MANIFESTS"
  until_true "$START_SECONDS" 'the API server is ready' kubectl get --raw /readyz
}
