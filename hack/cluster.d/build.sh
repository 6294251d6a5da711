#!/usr/bin/env bash
# Builds the programs and the two images of the local cluster, once for each state of their sources (see settings.sh).
# Kubernetes has no official download that needs no registry; its Go modules are pinned by go.mod and go.sum.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=settings.sh
. "$(dirname "$0")/settings.sh"
# shellcheck source-path=SCRIPTDIR source=store.sh
. "$PARTS/store.sh"
[[ ! -e $TOOLS/complete || ! -d $STORE ]] || exit 0
command -v go >/dev/null || fail 'no go on the PATH: Kubernetes is built with Go 1.25 or newer (https://go.dev/dl)'
mkdir -p "$TOOLS"
exec 9>"$CACHE/build.lock"
flock 9
[[ ! -e $TOOLS/complete || ! -d $STORE ]] || exit 0
cat >&2 <<END
cluster: building Kubernetes and helm, once: downloads 0.9 GB of sources, takes 9 minutes of processor time (5 on two
cluster: free cores) and 4 GB, nearly all of it in Go's own caches
END

version_of() { awk -v module="$1" '$1 == module {print $2}' "$PARTS/go/go.mod"; }

version=$(version_of k8s.io/kubernetes)
IFS=. read -r major minor _ <<<"${version#v}"
flags='-s -w'
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
  flags+=" -X $package.gitVersion=$version -X $package.gitMajor=$major -X $package.gitMinor=$minor"
done
# As helm's own Makefile does: without them `helm template` and `helm lint` take the cluster for Kubernetes 1.20.
flags+=" -X helm.sh/helm/v3/internal/version.version=$(version_of helm.sh/helm/v3)"
for package in lint/rules chartutil; do
  flags+=" -X helm.sh/helm/v3/pkg/$package.k8sVersionMajor=$major -X helm.sh/helm/v3/pkg/$package.k8sVersionMinor=$minor"
done
build() { (cd "$PARTS/go" && CGO_ENABLED=0 go build -mod=readonly -trimpath -ldflags "$flags" -o "$TOOLS/$1" "$2"); }
build kubebin .
build helm helm.sh/helm/v3/cmd/helm
for component in etcd kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubectl; do
  ln -sf kubebin "$TOOLS/$component"
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
gcc -Os -static -s -o "$work/pause" "$PARTS/pause.c"
build coredns ./coredns
mv "$TOOLS/coredns" "$work"
python3 "$PARTS/image.py" "$work/pause.tar" localhost/pause:3.10 "$work/pause"
python3 "$PARTS/image.py" "$work/coredns.tar" localhost/coredns:v1.14.3 "$work/coredns"
with_store import "$work/pause.tar" "$work/coredns.tar"
touch "$TOOLS/complete"
