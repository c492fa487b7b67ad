#!/usr/bin/env bash
# Makes what a protected broker needs, with new passwords, in FOLDER (which must not hold any yet):
#
#   users.acl                   for the server: users with the hashes of their passwords
#   ca.pem server.pem *.key     for TLS: a private authority and a certificate for the HOSTs, good for two years
#   prism.env                   for everybody else: the URLs with the passwords, and a first API key
#
# Usage: credentials.sh [--plain] [--redis-7.0] FOLDER HOST[:PORT] [HOST ...]
#   --redis-7.0    leave out what redis-server 7.0 (Debian 12) does not know
#   --plain        no TLS: URLs begin with redis:// (one machine, or a private network that you trust)
#   PRISM_CA_PATH  where clients will find ca.pem, if it is not FOLDER/ca.pem
set -euo pipefail
umask 077

plain="" old=""
while :; do
    case ${1:-} in
        --plain) plain=yes ;;
        --redis-7.0) old=' +client|setinfo' ;;
        *) break ;;
    esac
    shift
done
if [ $# -lt 2 ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
fi
template=$(cd "$(dirname "$0")" && pwd)/users.acl.in
mkdir -p "$1"
folder=$(cd "$1" && pwd)
address=$2
shift
host=${address%%:*}
port=${address#"$host"}
port=${port:-:6379}
if [ -e "$folder/users.acl" ]; then
    echo "credentials.sh: $folder/users.acl exists; passwords are never overwritten" >&2
    exit 1
fi

secret() { openssl rand -hex 24; }
hash() { printf %s "$1" | openssl dgst -sha256 -r | cut -d' ' -f1; }

admin=$(secret) client=$(secret) worker=$(secret) operator=$(secret) key=$(secret)

# Comments out, continued lines joined, hashes in.
sed -e '/^#/d' -e '/^$/d' "$template" |
    sed -e ':join' -e '/\\$/{N;s/ *\\\n */ /;b join' -e '}' |
    sed -e "s/@ADMIN@/$(hash "$admin")/" -e "s/@CLIENT@/$(hash "$client")/" \
        -e "s/@WORKER@/$(hash "$worker")/" -e "s/@OPERATOR@/$(hash "$operator")/" \
        ${old:+-e "s/$old//"} > "$folder/users.acl"

scheme=redis tail=""
if [ -z "$plain" ]; then
    scheme=rediss tail="?ssl_ca_certs=${PRISM_CA_PATH:-$folder/ca.pem}"
    names=""
    for name in "$host" "${@:2}" localhost 127.0.0.1; do
        case $name in *[!0-9.]*) kind=DNS ;; *) kind=IP ;; esac
        names="$names${names:+,}$kind:$name"
    done
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj "/CN=Prism broker CA" \
        -addext "keyUsage=critical,keyCertSign,cRLSign" -keyout "$folder/ca.key" -out "$folder/ca.pem" 2>/dev/null
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$host" \
        -keyout "$folder/server.key" -out "$folder/server.csr" 2>/dev/null
    openssl x509 -req -in "$folder/server.csr" -CA "$folder/ca.pem" -CAkey "$folder/ca.key" -CAcreateserial -days 730 \
        -extfile <(printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\n' "$names") \
        -out "$folder/server.pem" 2>/dev/null
    rm "$folder/server.csr"
    chmod 644 "$folder/ca.pem" "$folder/server.pem"
fi
chmod 644 "$folder/users.acl"  # hashes of random passwords: the server's user must be able to read them

url() { echo "$scheme://$1:$2@$host$port/0$tail"; }
cat > "$folder/prism.env" <<END
# Secrets: for the services that need them, and nobody else.
PRISM_CLIENT_URL=$(url prism-client "$client")
PRISM_WORKER_URL=$(url prism-worker "$worker")
PRISM_OPERATOR_URL=$(url prism-operator "$operator")
PRISM_ADMIN_URL=$(url prism-admin "$admin")
PRISM_API_KEYS=$key
END
echo "credentials.sh: users.acl, prism.env${tail:+, ca.pem and server.pem} are in $folder; keep ca.key and prism.env safe" >&2
