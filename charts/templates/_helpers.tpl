{{/* The labels of a component's objects: (list $ "operator"). */}}
{{- define "rlsrl.labelsOf" -}}
{{- $root := index . 0 -}}
{{ include "rlsrl.selectorOf" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end }}

{{/* The labels that select a component's pod. */}}
{{- define "rlsrl.selectorOf" -}}
app.kubernetes.io/name: rlsrl
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* The labels of the operator's objects, and of those of the release. */}}
{{- define "rlsrl.labels" -}}
{{ include "rlsrl.labelsOf" (list . "operator") }}
{{- end }}

{{/* The labels that select the operator's pod. */}}
{{- define "rlsrl.selector" -}}
{{ include "rlsrl.selectorOf" (list . "operator") }}
{{- end }}

{{- define "rlsrl.operatorName" -}}
{{ .Release.Name }}-operator
{{- end }}

{{- define "rlsrl.uiName" -}}
{{ .Release.Name }}-ui
{{- end }}

{{/* The part of a pod's spec that the values of its component choose: (list $ .Values.operator). */}}
{{- define "rlsrl.podOptions" -}}
{{- $root := index . 0 }}{{ $options := index . 1 -}}
{{- with $root.Values.images.pullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{ end -}}
securityContext:
  runAsNonRoot: true
  {{- range $name := list "runAsUser" "runAsGroup" "fsGroup" }}
  {{- $id := 10001 }}
  {{- if hasKey $options.securityContext $name }}{{ $id = index $options.securityContext $name }}{{ end }}
  {{- with $id }}
  {{ $name }}: {{ int64 . }}
  {{- end }}
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- with $options.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
tolerations:
  # By default a pod moves to another node only five minutes after its node is lost.
  {{- range list "not-ready" "unreachable" }}
  - {key: node.kubernetes.io/{{ . }}, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
  {{- end }}
  {{- with $options.tolerations }}{{ toYaml . | nindent 2 }}{{ end }}
{{- with $options.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $options.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* An image by its role: (list $ "actor" "-actor"). A digest takes precedence over a tag. */}}
{{- define "rlsrl.image" -}}
{{- $root := index . 0 }}{{ $image := index $root.Values.images (index . 1) }}
{{- $tag := $image.tag | default (printf "%s%s" ($root.Values.images.tag | default $root.Chart.AppVersion) (index . 2)) }}
{{- with $root.Values.images.registry }}{{ . }}/{{ end }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $tag }}{{ end }}
{{- end }}
