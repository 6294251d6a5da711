#!/usr/bin/env bash
# Builds the programs and the two images of the local cluster, once for each state of their sources (see settings.sh).
# Kubernetes has no official download that needs no registry; its Go modules are pinned by go.mod and go.sum.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=settings.sh
. "$(dirname "$0")/settings.sh"
[[ ! -e $TOOLS/complete ]] || exit 0
command -v go >/dev/null || fail 'no go on the PATH: Kubernetes is built with Go 1.25 or newer (https://go.dev/dl)'
command -v gcc >/dev/null || fail 'no gcc on the PATH: the pause program of pods is built with it'
mkdir -p "$TOOLS"
exec 9>"$TOOLS/lock"
flock 9
[[ ! -e $TOOLS/complete ]] || exit 0
cat >&2 <<END
cluster: building Kubernetes and helm, once: downloads 0.9 GB of sources, takes 9 minutes of processor time (5 on two
cluster: free cores) and 4 GB, nearly all of it in Go's own caches
END

version=$(awk '$1 == "k8s.io/kubernetes" {print $2}' "$PARTS/go/go.mod")
IFS=. read -r major minor _ <<<"${version#v}"
flags='-s -w'
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
  flags+=" -X $package.gitVersion=$version -X $package.gitMajor=$major -X $package.gitMinor=$minor"
done
helm=$(awk '$1 == "helm.sh/helm/v3" {print $2}' "$PARTS/go/go.mod")
flags+=" -X helm.sh/helm/v3/internal/version.version=$helm"
build() { (cd "$PARTS/go" && CGO_ENABLED=0 go build -mod=readonly -trimpath -ldflags "$flags" -o "$TOOLS/$1" "$2"); }
build kubebin .
build helm helm.sh/helm/v3/cmd/helm
mkdir -p "$TOOLS/pause" "$TOOLS/coredns"
build coredns/coredns ./coredns
for component in etcd kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubectl; do
  ln -sf kubebin "$TOOLS/$component"
done
gcc -Os -static -s -o "$TOOLS/pause/pause" "$PARTS/pause.c"
python3 "$PARTS/image.py" "$TOOLS/pause.tar" localhost/pause:3.10 "$TOOLS/pause/pause"
python3 "$PARTS/image.py" "$TOOLS/coredns.tar" localhost/coredns:v1.14.3 "$TOOLS/coredns/coredns"
touch "$TOOLS/complete"
