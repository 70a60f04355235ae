{{/* Name of the objects: it is that of a pod and of a host, too. */}}
{{- define "farcall.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/* The endpoint's local name. */}}
{{- define "farcall.endpoint" -}}
{{- .Values.endpointName | default .Release.Name }}
{{- end }}

{{- define "farcall.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Labels by which the agent's pod is selected; they never change. */}}
{{- define "farcall.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "farcall.labels" -}}
{{ include "farcall.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* The endpoint's config.yaml: the values' over that of the chart. */}}
{{- define "farcall.config" -}}
{{- $chart := dict "display_name" (include "farcall.endpoint" .) "shutdown_grace" (sub .Values.terminationGracePeriodSeconds 15) }}
{{- if .Values.blocks.pods }}
{{- $address := printf "%s.%s.svc" (include "farcall.name" .) .Release.Namespace }}
{{- $provider := dict "type" "KubernetesProvider" "image" (include "farcall.image" .) "namespace" .Release.Namespace }}
{{- $_ := set $provider "service_account_name" (printf "%s-block" (include "farcall.name" .)) }}
{{- $_ := set $provider "run_as_non_root" true }}
{{- $_ := set $provider "user_id" "1000" }}
{{- $_ := set $provider "group_id" "1000" }}
{{- with .Values.image.pullSecrets }}
{{- $_ := set $provider "secret" (first .) }}
{{- end }}
{{- $_ := set $chart "engine" (dict "address" $address "provider" $provider) }}
{{- end }}
{{- mergeOverwrite $chart (deepCopy .Values.config) | toYaml }}
{{- end }}
