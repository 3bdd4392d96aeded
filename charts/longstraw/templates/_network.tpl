{{/* One address block of an egress rule. The metadata servers of clouds hand out the node's credentials: no block opens
them. Takes the CIDR block; 169.254.169.254 is 2852039166. */}}
{{- define "longstraw.ipBlock" -}}
{{- $cidr := . }}
{{- $length := splitList "/" $cidr | last | int64 }}
{{- $hidden := "" }}
{{- if contains ":" $cidr }}
{{- /* the one IPv6 address in use, fd00:ec2::254, by the blocks that people write */}}
{{- if or (eq $length 0) (regexMatch "^(?i)f[cd]00:(0*:)*/" $cidr) (regexMatch "^(?i)fd00:0*ec2:" $cidr) }}
{{- $hidden = "fd00:ec2::254/128" }}
{{- end }}
{{- else }}
{{- $address := 0 }}
{{- range splitList "." (splitList "/" $cidr | first) }}
{{- $address = add (mul $address 256) (int64 .) }}
{{- end }}
{{- $size := 1 }}
{{- range until (int (sub 32 $length)) }}
{{- $size = mul $size 2 }}
{{- end }}
{{- if eq (div $address $size) (div 2852039166 $size) }}
{{- $hidden = "169.254.169.254/32" }}
{{- end }}
{{- end }}
{{- if eq $cidr $hidden }}
{{- fail (printf "networkPolicy: %s is a cloud's metadata server, which hands out the node's credentials; leave it out" $cidr) }}
{{- end -}}
- ipBlock:
    cidr: {{ $cidr | quote }}
    {{- with $hidden }}
    except: [{{ . | quote }}]
    {{- end }}
{{- end }}
