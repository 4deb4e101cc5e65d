#!/bin/sh
# Train all three pocket models at once, each on a GPU of its own where there are that many.
#
#   sh examples/train_pocket/run_all.sh OUT [SECONDS [CALL_SECONDS [WORK]]]
#   START=oscar_mm/models sh examples/train_pocket/run_all.sh OUT ...
#
# OUT           gets pocket-vl.tar, pocket-llava.tar, pocket-omni.tar (10 MB each) and logs.tar.gz
# SECONDS       of training of each model in all calls together (default 960)
# CALL_SECONDS  of this call (default 480, on fewer than three GPUs 360); evaluation and start take
#               one to three minutes more. The same command again continues from WORK
# WORK          checkpoints, which are large (default /tmp/pocket)
#
# Run it at the root of the repository. It needs build/pocket/glyphs.npz and speech.npz: see
# README.md beside this file. START is a folder of trained models to go on from. PYTHON names the interpreter, TRAIN_FLAGS replaces "--compile".
set -u
out=$1
seconds=${2:-960}
work=${4:-/tmp/pocket}
python=${PYTHON:-python3}
export PYTHONPATH=. PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=2
export TORCHINDUCTOR_CACHE_DIR="$work/inductor"
mkdir -p "$out" "$work"

gpus=$($python -c 'import torch; print(max(1, torch.cuda.device_count()))') || exit 1
[ "$gpus" -ge 3 ] && call=${3:-480} || call=${3:-360}
number=0
started=
for name in pocket-vl pocket-llava pocket-omni; do
  start=${START:+--start $START/$name}
  # shellcheck disable=SC2086
  CUDA_VISIBLE_DEVICES=$((number % gpus)) $python -m examples.train_pocket.train "$name" \
    --out "$work/$name" --seconds "$seconds" --call-seconds "$call" $start \
    ${TRAIN_FLAGS---compile} >"$work/$name.log" 2>&1 &
  started="$started $!:$name"
  number=$((number + 1))
done

failed=0
for one in $started; do
  if ! wait "${one%%:*}"; then
    failed=1
    echo "${one#*:} failed:"
    tail -n 25 "$work/${one#*:}.log"
  fi
done

for name in pocket-vl pocket-llava pocket-omni; do
  [ -d "$work/$name/model" ] && tar -C "$work/$name/model" -cf "$out/$name.tar" .
  echo "$name: $(tail -n 2 "$work/$name/curve.jsonl" 2>/dev/null | cut -c 1-2500)"
done
(cd "$work" && tar -czf "$out/logs.tar.gz" ./*.log ./*/curve.jsonl)
exit $failed
