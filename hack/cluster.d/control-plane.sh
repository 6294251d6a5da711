# shellcheck shell=bash
# Functions that start the control plane inside node 1, where node-init.sh sources them.

start() { # start COMPONENT FLAGS...: start in the background, with a log
  local component=$1
  shift
  # Processor time is scarcer than memory here: a quarter of the garbage collections saves a tenth of it.
  GOGC=400 "$TOOLS/$component" "$@" >>"$STATE/log/$component.log" 2>&1 &
  echo $! >"$STATE/$component.pid" # a PID in node 1's namespace
}

start_etcd() {
  # No fsync: a test cluster's data need not survive a power loss of the machine.
  start etcd --data-dir "$STATE/etcd" --unsafe-no-fsync --listen-client-urls http://127.0.0.1:2379 --log-level warn \
    --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380
}

start_apiserver() {
  start kube-apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address="$(node_ip 1)" --secure-port=6443 \
    --advertise-address="$(node_ip 1)" --client-ca-file="$PKI/ca.crt" --tls-cert-file="$PKI/apiserver.crt" \
    --tls-private-key-file="$PKI/apiserver.key" --service-account-issuer=https://kubernetes.default.svc.cluster.local \
    --service-account-key-file="$PKI/service-account.pub" --service-account-signing-key-file="$PKI/service-account.key" \
    --service-cluster-ip-range="$SERVICE_CIDR" --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
    --allow-privileged=true --kubelet-certificate-authority="$PKI/ca.crt" \
    --kubelet-client-certificate="$PKI/kubelet-client.crt" --kubelet-client-key="$PKI/kubelet-client.key" \
    --kubelet-preferred-address-types=InternalIP --requestheader-client-ca-file="$PKI/ca.crt" \
    --requestheader-allowed-names=front-proxy-client --requestheader-extra-headers-prefix=X-Remote-Extra- \
    --requestheader-group-headers=X-Remote-Group --requestheader-username-headers=X-Remote-User \
    --proxy-client-cert-file="$PKI/front-proxy.crt" --proxy-client-key-file="$PKI/front-proxy.key" \
    --audit-policy-file="$PARTS/audit-policy.yaml" --audit-log-path="$AUDIT_LOG" \
    --audit-log-maxsize=4096 # MB: one file for a whole test run
}

start_controllers() {
  local c config
  # Started last, because they exit if the roles do not exist yet.
  until_true "$START_SECONDS" 'the API server is ready' kubectl get --raw /readyz
  for c in kube-controller-manager kube-scheduler; do
    config=$PKI/$c.kubeconfig
    local flags=(--kubeconfig="$config" --authentication-kubeconfig="$config" --authorization-kubeconfig="$config"
      --leader-elect=false --bind-address=127.0.0.1 --kube-api-qps=200 --kube-api-burst=400)
    [[ $c == kube-scheduler ]] || flags+=(--service-account-private-key-file="$PKI/service-account.key"
      --root-ca-file="$PKI/ca.crt" --cluster-signing-cert-file="$PKI/ca.crt" --cluster-signing-key-file="$PKI/ca.key"
      --use-service-account-credentials --node-monitor-grace-period="$NODE_GRACE"
      --flex-volume-plugin-dir=/run/flex-volume-plugins) # the default is below the host's /usr
    start "$c" "${flags[@]}"
  done
}

recycle_volumes() { # empty a volume and make it available once its claim is deleted, as a provisioner does
  local volume phase claim
  local -A recycled=() # each volume's last claim: the watch may report a volume twice
  while :; do          # the watch ends with the API server
    while read -r volume phase claim; do
      [[ $volume == standard-* && $phase == Released && -n $claim && $claim != "${recycled[$volume]:-}" ]] || continue
      find "$STATE/volumes/${volume#standard-}" -mindepth 1 -delete
      ! kubectl patch pv "$volume" --type=json -p '[{"op": "remove", "path": "/spec/claimRef"}]' || recycled[$volume]=$claim
    done < <(kubectl get pv --watch -o jsonpath='{.metadata.name} {.status.phase} {.spec.claimRef.uid}{"\n"}')
    sleep 1
  done >>"$STATE/log/volumes.log" 2>&1
}
