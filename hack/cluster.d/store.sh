# shellcheck shell=bash
# Images of the local cluster. The store is a containerd root with every loaded image. A node starts with a copy made of hard
# links, so an image is imported and stored once for all nodes and clusters. Running nodes import a loaded image as well.
# Sourced.

STORE=$CACHE/store
export CONTAINERD_NAMESPACE=k8s.io    # the namespace that a kubelet uses

containerd_config() { # containerd_config ROOT RUN: print the settings of store and nodes; RUN has sockets and state
  cat <<TOML
version = 2
root = "$1"
state = "$2/state"
[grpc]
  address = "$2/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "$2/opt"
TOML
}

with_store() ( # with_store COMMAND ARGUMENT...: run the command with exclusive access to the store's containerd
  exec 8>"$CACHE/store.lock"
  flock 8
  run=$(mktemp -d)
  { echo 'disabled_plugins = ["io.containerd.grpc.v1.cri"]'; containerd_config "$STORE" "$run"; } >"$run/config.toml"
  # Its own mount namespace: the mounts of unpacking disappear with the process.
  unshare --mount containerd --config "$run/config.toml" >"$CACHE/store.log" 2>&1 8>&- &
  pid=$!
  trap 'kill "$pid" || true; wait "$pid" || true; rm -rf "$run"' EXIT
  export CONTAINERD_ADDRESS=$run/containerd.sock
  until_true "$START_SECONDS" "the image store is served (its log: $CACHE/store.log)" ctr version
  "$@"
)

# copy_store ROOT: copy the store to ROOT unless ROOT exists. Only databases change in place: other files are hard links.
copy_store() (
  set -e
  [[ ! -d $1 ]] || exit 0
  exec 8>"$CACHE/store.lock"
  flock --shared 8
  rm -rf "$1.part"
  cp -al "$STORE" "$1.part"
  cd "$STORE"
  find . -name '*.db' -exec cp --remove-destination {} "$1.part/{}" \;
  mv "$1.part" "$1"
)

collect_garbage() { ctr leases delete --sync "$(ctr leases create)" >/dev/null; } # a synchronous removal of any lease runs the collector

# import ARCHIVE...: import new images into the containerd at CONTAINERD_ADDRESS, and remove unused data. While ctr unpacks an
# image, containerd protects its new layers from garbage collection, but not layers that were unpacked before for the replaced
# image. So a replaced image keeps a name until the new one is complete, and remains of an interrupted import are removed
# first.
import() {
  local archive images name old digest
  collect_garbage
  for archive in "$@"; do
    images=$("$PARTS/archive.py" names "$archive")
    while read -r name digest; do
      [[ $(digest_of "$name") != "$digest" ]] || continue
      while read -r old _; do
        [[ -z $(digest_of "$old") ]] || ctr images tag --force "$old" "$old-replaced" >/dev/null
      done <<<"$images"
      ctr content ls --quiet | "$PARTS/archive.py" stream "$archive" | ctr images import - >/dev/null
      break # the import brought all images of the archive
    done <<<"$images"
  done
  ctr images ls --quiet 'name~=-replaced$' | xargs --no-run-if-empty ctr images rm >/dev/null
  collect_garbage
}

digest_of() { ctr images check "name==\"$1\"" | awk '$NF == "true" {print $3}'; } # digest_of NAME: print its digest if it is unpacked
