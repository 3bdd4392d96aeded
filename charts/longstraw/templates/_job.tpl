{{/* Pod template of the chart's small jobs. Takes root, name, arguments, restart and annotations. */}}
{{- define "longstraw.pod" -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "longstraw.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
  annotations:
    sidecar.istio.io/inject: "false"
spec:
  {{- include "longstraw.podSpec" . | nindent 2 }}
{{- end }}

{{- define "longstraw.podSpec" -}}
{{- $values := .root.Values -}}
{{- $fullname := include "longstraw.fullname" .root -}}
serviceAccountName: {{ include "longstraw.serviceAccount" .root | quote }}
automountServiceAccountToken: {{ .apiAccess | default false }}
restartPolicy: Never
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 $values.jobs.runAsUser }}
  runAsGroup: {{ int64 $values.jobs.runAsUser }}
  fsGroup: {{ int64 $values.jobs.runAsUser }}
  seccompProfile:
    type: RuntimeDefault
{{- with $values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with $values.jobs.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.jobs.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: {{ .name }}
    image: {{ $values.images.control }}
    imagePullPolicy: IfNotPresent
    command: [longstraw]
    args:
      {{- toYaml .arguments | nindent 6 }}
    envFrom:
      - configMapRef:
          name: longstraw-store
      - configMapRef:
          name: {{ $fullname }}-environment
      {{- if $values.store.secretName }}
      - secretRef:
          name: {{ $values.store.secretName | quote }}
      {{- end }}
    env:
      - name: HOME
        value: /tmp
      {{- if $values.kfp.tokenSecretName }}
      - name: KFP_EXISTING_TOKEN
        valueFrom:
          secretKeyRef:
            name: {{ $values.kfp.tokenSecretName | quote }}
            key: token
      {{- end }}
    resources:
      {{- toYaml $values.jobs.resources | nindent 6 }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: [ALL]
    volumeMounts:
      - name: temporary
        mountPath: /tmp
      - name: configuration
        mountPath: /etc/longstraw
        readOnly: true
      {{- if $values.store.caBundle.configMapName }}
      - name: store-certificate-authority
        mountPath: /etc/longstraw-certificates
        readOnly: true
      {{- end }}
      {{- if $values.kfp.tokenAudience }}
      - name: kfp-token
        mountPath: /var/run/secrets/kubeflow/pipelines
        readOnly: true
      {{- end }}
volumes:
  - name: temporary
    emptyDir:
      sizeLimit: 2Gi
  - name: configuration
    configMap:
      name: {{ $fullname }}-configuration
  {{- if $values.store.caBundle.configMapName }}
  - name: store-certificate-authority
    configMap:
      name: {{ $values.store.caBundle.configMapName | quote }}
      items:
        - key: {{ $values.store.caBundle.key | quote }}
          path: ca.crt
  {{- end }}
  {{- if $values.kfp.tokenAudience }}
  - name: kfp-token
    projected:
      sources:
        - serviceAccountToken:
            path: token
            audience: {{ $values.kfp.tokenAudience | quote }}
            expirationSeconds: 7200
  {{- end }}
{{- end }}
