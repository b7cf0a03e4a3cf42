# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
# Train all combinations into folder $1, JOBS at a time (they share one GPU).

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
OUT="$1"
: ${JOBS:=8}
: ${PRECISIONS:="bf16 fp8-delayed"}
: ${STEPS:=20}

one() { # impl precision tracker recompute [--patched]
    timeout 240 python3 "$HERE/train_gpt.py" --impl "$1" --precision "$2" --tracker "$3" --recompute "$4" $5 \
        --steps "$STEPS" --out "$OUT" >"$OUT/log.$1.$2.$3.$4.$5" 2>&1 || echo "ended with $?: $*"
}
export -f one
export HERE OUT STEPS

for precision in $PRECISIONS; do
    for patched in "" --patched; do
        echo "none $precision te none,full,block,core_attn,mlp,layernorm,attn+mlp $patched"
        echo "full_iteration $precision te none,full,core_attn,mlp,attn+mlp $patched"
        echo "transformer_engine $precision te none,core_attn,mlp,layernorm,attn+mlp $patched"
        for recompute in none core_attn mlp layernorm attn+mlp; do
            echo "local $precision te $recompute $patched"
        done
        if [ "$precision" = bf16 ]; then
            for tracker in mcore bytes; do echo "none $precision $tracker none,full,core_attn,mlp $patched"; done
        fi
    done
done | xargs -P "$JOBS" -I{} bash -c 'one {}'
