#!/bin/bash
# An hour on a real cluster: does a run on GKE do what docs/pods.md says?
#
#   tpu_launch/try_on_gke.sh gs://my-bucket/hour/pretrain --gin_file=... --gin.TASK=...
#
# The model directory must be unused; the other arguments are those of `up`, without
# --backend. The cluster is that of kubectl's context, and NAMESPACE, PYTHON and MINUTES
# (to wait for each step) are read from the environment. Every step prints what it
# expects. The first that fails ends the script, and at its end it deletes the run,
# whatever has happened.
set -euo pipefail
model_dir=${1:?give an unused model directory, gs://BUCKET/..., and the flags of up}
shift
python=${PYTHON:-.venv/bin/python} namespace=${NAMESPACE:-default}
minutes=${MINUTES:-30} said=$(mktemp)
up=(up --backend=gke "--gin.MODEL_DIR=$model_dir" "--gin.DEADLINE_HOURS=1.5"
  "--gin.hardware.LaunchConfig.namespace='$namespace'" "$@")

expect() { printf '\n== %s\n   expected: %s\n' "$1" "$2"; }
fail() { echo "   NOT AS EXPECTED: $1" >&2 && exit 1; }
launcher() { "$python" -m tpu_launch "$@"; }
of_run() { launcher "$@" "--gin.MODEL_DIR=$model_dir"; }
says() { grep --quiet -- "$1" "$said" || { cat "$said"; fail "no '$1' in the output"; }; }
cluster() { kubectl --namespace="$namespace" "$@"; }
step() {
  of_run status --json | "$python" -c \
    "import json, sys; print(json.load(sys.stdin)['roles'][0]['step'] or 0)"
}
jobset() { cluster get jobset "$run" --output="jsonpath={.status.$1}"; }
passes() { local now && now=$(step) && ((now > $1)); }
restarted() { [ "$(jobset restarts)" = 1 ]; }
wait_for() {
  local until=$((SECONDS + 60 * minutes))
  until "$@"; do
    ((SECONDS < until)) || fail "'$*' does not hold after $minutes minutes"
    sleep 15
  done
}
give_back() {
  code=$?
  expect down "'nothing is left', no JobSet, and checkpoints stay in $model_dir"
  of_run down || code=1
  if cluster get jobset "$run"; then code=1; fi
  gcloud storage ls "${model_dir%/}/" || code=1
  [ $code != 0 ] && echo "NOT AS EXPECTED" || echo "all as expected, in $SECONDS s"
  exit $code
}

if of_run status --once > /dev/null 2>&1; then fail "a run was launched in $model_dir"; fi
expect "up --dry_run" "one JobSet, which the cluster would accept; nothing is created"
launcher "${up[@]}" --dry_run > "$said"
run=$(sed -n 's/^  name: //p' "$said" | head -n 1)
cluster apply --dry-run=server --filename="$said"
if cluster get jobset "$run"; then fail "it was created"; fi

trap give_back EXIT
expect up "'created JobSet $run', a trainer and a builder, and the command ends"
launcher "${up[@]}" --yes 2>&1 | tee "$said"
says "created JobSet $run"
expect status "pods are admitted together, and the trainer makes updates"
wait_for passes 0
of_run status --once
cluster get pods --selector="realm-run=$run" --output=wide
expect logs "lines of every trainer, each after 'trainer/<number> | '"
of_run logs --role=trainer > "$said"
tail -n 5 "$said"
says '^trainer/0 | '
expect "a second up" "'nothing changed', and no other pods"
launcher "${up[@]}" --yes 2>&1 | tee "$said"
says "nothing changed"

expect "a trainer's pod is deleted" \
  "it saves and ends with 143; all is started again, and none counts toward max_restarts"
pods=$(cluster get pods --selector="realm-run=$run,realm-role=trainer" --output=name)
cluster delete "${pods%%$'\n'*}"
wait_for restarted
before=$(step) counted=$(jobset restartsCountTowardsMax)
((counted == 0)) || fail "the restart counts"
expect status "the trainer goes on from its checkpoint, past step $before"
wait_for passes "$before"
