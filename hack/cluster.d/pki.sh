#!/usr/bin/env bash
# pki.sh 'I...': create one authority, the certificates of all clients and servers, and the kubeconfigs.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=settings.sh
. "$(dirname "$0")/settings.sh"
umask 077
mkdir -p "$PKI"
cd "$PKI"

certificate() { # certificate NAME SUBJECT [ALTERNATIVE_NAMES]
  openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"
  printf 'extendedKeyUsage=clientAuth,serverAuth\n%s\n' "${3:+subjectAltName=$3}" >"$1.ext"
  openssl req -new -key "$1.key" -subj "$2" |
    openssl x509 -req -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -extfile "$1.ext" -out "$1.crt"
}

kubeconfig() { # kubeconfig FILE CERTIFICATE
  cat >"$1" <<YAML
apiVersion: v1
kind: Config
clusters: [{name: rlsrl, cluster: {server: "https://$(node_ip 1):6443", certificate-authority-data: $(base64 -w0 <ca.crt)}}]
users: [{name: rlsrl, user: {client-certificate-data: $(base64 -w0 <"$2.crt"), client-key-data: $(base64 -w0 <"$2.key")}}]
contexts: [{name: rlsrl, context: {cluster: rlsrl, user: rlsrl}}]
current-context: rlsrl
YAML
}

openssl ecparam -name prime256v1 -genkey -noout -out ca.key
openssl req -x509 -new -key ca.key -days 30 -subj /CN=rlsrl-test-ca -out ca.crt
api=DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local
certificate apiserver /CN=kube-apiserver "$api,DNS:localhost,IP:127.0.0.1,IP:${SERVICE_CIDR%.*}.1,IP:$(node_ip 1)"
certificate kubelet-client /O=system:masters/CN=kube-apiserver-kubelet-client
certificate front-proxy /CN=front-proxy-client
certificate admin /O=system:masters/CN=admin
kubeconfig "$ADMIN" admin
for component in kube-controller-manager kube-scheduler kube-proxy; do
  certificate "$component" "/CN=system:$component"
  kubeconfig "$component.kubeconfig" "$component"
done
for i in $1; do
  certificate "node-$i" "/O=system:nodes/CN=system:node:node-$i" "DNS:node-$i,IP:$(node_ip "$i")"
  kubeconfig "node-$i.kubeconfig" "node-$i"
done
openssl genrsa -out service-account.key 2048
openssl rsa -in service-account.key -pubout -out service-account.pub
