{{/* Names and labels that every object of a release shares. */}}
{{- define "longstraw.fullname" -}}longstraw-{{ .Values.team }}{{- end }}

{{- define "longstraw.serviceAccount" -}}
{{- if .Values.serviceAccount.name }}{{ .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create }}{{ include "longstraw.fullname" . }}
{{- else }}{{ fail "serviceAccount.name: name the existing account, or let the chart create one (serviceAccount.create: true)" }}
{{- end }}
{{- end }}

{{- define "longstraw.labels" -}}
app.kubernetes.io/name: longstraw
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
longstraw.io/team: {{ .Values.team | quote }}
{{- end }}

{{/* The specification's words for store.caBundle; empty without one. */}}
{{- define "longstraw.authority" -}}
{{- with .Values.store.caBundle }}{{- if .configMapName }}
config_map: {{ .configMapName | quote }}
key: {{ .key | quote }}
{{- end }}{{- end }}
{{- end }}

{{/* The transaction as stages get it: with the store's authority, so that their pods trust it too. */}}
{{- define "longstraw.transaction" -}}
{{- $transaction := deepCopy .Values.transaction }}
{{- $authority := include "longstraw.authority" . | fromYaml }}
{{- if $authority }}
{{- $transaction = mergeOverwrite $transaction (dict "cluster" (dict "store_authority" $authority)) }}
{{- end }}
{{- toYaml $transaction }}
{{- end }}

{{/* What a schema cannot say because it compares two values. */}}
{{- define "longstraw.check" -}}
{{- if ne (last (splitList "/" (trimSuffix "/" .Values.store.uri))) .Values.team }}
{{- fail (printf "store.uri: %s does not end in /%s: every team has a prefix of its own" .Values.store.uri .Values.team) }}
{{- end }}
{{- if and (not .Values.store.secretName) (not .Values.serviceAccount.annotations) }}
{{- fail "store.secretName: name the secret with the store's credentials, or give the service account a role (serviceAccount.annotations)" }}
{{- end }}
{{- if and .Values.kfp.tokenSecretName .Values.kfp.tokenAudience }}
{{- fail "kfp: tokenSecretName and tokenAudience exclude each other" }}
{{- end }}
{{- if and .Values.recurring.enabled (not .Values.transaction) }}
{{- fail "recurring.enabled: give the specification to submit in transaction" }}
{{- end }}
{{- $authority := dig "cluster" "store_authority" dict .Values.transaction }}
{{- if and $authority (ne (toJson (merge (dict) $authority (dict "key" "ca.crt"))) (toJson (include "longstraw.authority" . | fromYaml))) }}
{{- fail "transaction.cluster.store_authority: leave it out; the chart takes it from store.caBundle" }}
{{- end }}
{{- if and .Values.transaction (ne (dig "storage" "uri" "" .Values.transaction) .Values.store.uri) }}
{{- fail "transaction.storage.uri: must be store.uri: a team's runs stay below the team's prefix" }}
{{- end }}
{{- end }}
