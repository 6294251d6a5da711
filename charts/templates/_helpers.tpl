{{/* The labels of all objects of the chart. */}}
{{- define "rlsrl.labels" -}}
app.kubernetes.io/name: rlsrl
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The labels that select the operator's pod. */}}
{{- define "rlsrl.selector" -}}
app.kubernetes.io/name: rlsrl
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "rlsrl.operatorName" -}}
{{ .Release.Name }}-operator
{{- end }}

{{/* An image by its role: (list $ "actor" "-actor"). A digest takes precedence over a tag. */}}
{{- define "rlsrl.image" -}}
{{- $root := index . 0 }}{{ $image := index $root.Values.images (index . 1) }}
{{- $tag := $image.tag | default (printf "%s%s" ($root.Values.images.tag | default $root.Chart.AppVersion) (index . 2)) }}
{{- with $root.Values.images.registry }}{{ . }}/{{ end }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $tag }}{{ end }}
{{- end }}
