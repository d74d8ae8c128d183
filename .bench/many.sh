#!/usr/bin/env bash
# Two services on one folder, killed again and again; the docstring of many.py says more.
#
#     nice bash .bench/many.sh gluster|local [options of many.py]
#
# gluster: a service and a mount of the volume in each of two network namespaces. Needs root
# and Debian's nginx-light, glusterfs-server, glusterfs-client and iproute2. BRICKS=3 makes
# it a replicated volume, DEFAULTS=1 mounts it as GlusterFS does by default (loses turns).
set -euo pipefail
kind=${1:?gluster or local}; shift
many=("${PYTHON:-python}" "$(dirname "$0")/many.py")
[ "$kind" = gluster ] || exec "${many[@]}" "$@"

folder=$(mktemp -d)
gluster() { command gluster --mode=script volume "$@" >>"$folder/gluster.log"; }
clean() {
  set +e
  for n in a b; do umount "$folder/$n" || umount -l "$folder/$n"; done
  gluster stop many force; gluster delete many
  kill "${glusterd:-}"; wait "${glusterd:-}"
  for n in a b; do ip netns del many-$n; done
  ip link del many-bridge
  rm -rf "$folder"
}
trap 'clean >/dev/null 2>&1' EXIT

ip link add many-bridge type bridge
ip addr add 10.77.0.1/24 dev many-bridge
ip link set many-bridge up
for n in a:11 b:12; do
  name=many-${n%:*}
  ip netns add $name
  ip link add $name type veth peer name eth0 netns $name
  ip link set $name master many-bridge up
  ip -n $name addr add 10.77.0.${n#*:}/24 dev eth0
  ip -n $name link set eth0 up
  ip -n $name link set lo up
done

glusterd --no-daemon >"$folder/glusterd.log" 2>&1 & glusterd=$!
for _ in $(seq 60); do gluster list 2>>"$folder/gluster.log" && break; sleep 0.5; done
bricks=()
for n in $(seq "${BRICKS:-1}"); do bricks+=("10.77.0.1:$folder/brick$n"); done
replica=(); [ "${#bricks[@]}" = 1 ] || replica=(replica "${#bricks[@]}")
gluster create many "${replica[@]}" "${bricks[@]}" force
options=log-level=WARNING
if [ -z "${DEFAULTS:-}" ]; then
  for name in stat-prefetch open-behind quick-read io-cache; do
    gluster set many performance.$name off
  done
  options+=,attribute-timeout=0,entry-timeout=0,negative-timeout=0
fi
gluster start many
for n in a b; do
  mkdir "$folder/$n"
  nsenter --net=/run/netns/many-$n \
    mount -t glusterfs -o "$options,log-file=$folder/$n.log" 10.77.0.1:/many "$folder/$n"
done
"${many[@]}" --front 10.77.0.1 --hosts 10.77.0.11 10.77.0.12 \
  --namespaces many-a many-b --folders "$folder/a" "$folder/b" "$@"
