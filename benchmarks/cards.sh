#!/usr/bin/env bash
# Cards of this machine for docs/cards: real models and the built-in one, one after another.  Close other programs before.
#
#   benchmarks/cards.sh MACHINE FOLDER          # MACHINE is part of the files' names, as xeon-amx; FOLDER has the models
#   OUT=cards TOKENS=64 benchmarks/cards.sh xeon-amx ~/models
#
# Of FOLDER, what is there is measured: smollm2, coder05 and coder15, each as .gguf and as a Transformers folder;
# what is not there is named.  A card that exists is kept: remove it to measure again.
set -euo pipefail
[ $# -eq 2 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
machine=$1 models=$(realpath "$2")
cd "$(dirname "$0")/.."
out=${OUT:-docs/cards} tokens=${TOKENS:-64}
foretoken=${FORETOKEN:-foretoken}
mkdir -p "$out"

card() { # NAME TARGET ARMS...
  local name=$1 target=$2 file="$out/$1-$machine.json" arms=()
  shift 2
  if [ -e "$file" ]; then
    echo "$file is there: kept"
    return
  fi
  if [ "$target" != builtin ] && [ ! -e "$target" ]; then
    echo "$name: not measured, $target is not there"
    return
  fi
  for arm in "$@"; do arms+=(--drafter "$arm"); done
  # shellcheck disable=SC2086
  $foretoken bench --target "$target" "${arms[@]}" --max-new-tokens "$tokens" --max-prompts 2 --repeat 3 --card "$file"
}

card builtin builtin ngram suffix model,k=4 eagle3 medusa auto
card smollm2-gguf "$models/smollm2.gguf" ngram suffix,share=false recycling auto
card smollm2-bf16 "$models/smollm2" ngram suffix,share=false quantized,bits=4,k=4 auto
card coder05-gguf "$models/coder05.gguf" ngram suffix,share=false auto
card coder05-bf16 "$models/coder05" ngram suffix,share=false quantized,bits=4,k=4 auto
card coder15-gguf "$models/coder15.gguf" ngram "model:$models/coder05.gguf,k=4" auto
card coder15-bf16 "$models/coder15" ngram quantized,bits=4,k=4 auto
