# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Train a small Megatron-core GPT with Transformer Engine layers and dropout, once per kind of recompute.

    python train_gpt.py --impl none --precision bf16 --recompute none,full,core_attn [--patched] --out folder

Writes one file per run with the losses of all steps and the gradients of all steps; compare_gpt.py reads them.
"""

from __future__ import annotations

import argparse
import gc
import os
import traceback
from pathlib import Path
from typing import Any

import torch

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    "attn+mlp": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
}
PRECISION = {
    "bf16": {},
    "fp8-delayed": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4},
    "fp8-current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8-block": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}
TRACKERS = {
    "te": {"te_rng_tracker": True},
    "mcore": {"use_cudagraphable_rng": True},
    "bytes": {},
}
SEQUENCE, BATCH, VOCABULARY, MICRO_BATCHES = 128, 2, 512, 2


def build(recompute: str, impl: str, precision: str, layers: int) -> Any:
    """Return the model, wrapped as Megatron trains it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=256,
        num_attention_heads=4,
        ffn_hidden_size=1024,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_dtype=torch.bfloat16,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        deterministic_mode=False,
        cuda_graph_impl=impl,
        **PRECISION[precision],
        **RECOMPUTE[recompute],
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
    ).cuda()
    model = model.to(torch.bfloat16).train()
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False), model
    )


class Calls:
    """Counts forwards of what can be recomputed: more of them than without recompute show that it was."""

    def __init__(self) -> None:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention
        from megatron.core.transformer.mlp import MLP

        self.count = 0
        for kind in (TEDotProductAttention, MLP):
            self._wrap(kind)

    def _wrap(self, kind: Any) -> None:
        forward = kind.forward

        def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return forward(module, *args, **kwargs)

        kind.forward = counted


def batches(steps: int) -> list[list[dict[str, torch.Tensor]]]:
    """Return the same random tokens for every run."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(VOCABULARY, (steps, MICRO_BATCHES, BATCH, SEQUENCE + 1), generator=generator).cuda()
    return [[{"tokens": b[:, :-1].contiguous(), "labels": b[:, 1:].contiguous()} for b in step] for step in rows]


def forward_step(iterator: Any, model: Any) -> Any:
    """Run one micro-batch, in the form that Megatron's schedules call."""
    batch = next(iterator)
    tokens = batch["tokens"]
    positions = torch.arange(SEQUENCE, device=tokens.device).expand_as(tokens)
    losses = model(tokens, positions, None, labels=batch["labels"])

    def loss_of(output: torch.Tensor) -> Any:
        loss = output.float().mean()
        return loss, {"loss": loss.detach()}

    return losses, loss_of


def train(recompute: str, arguments: argparse.Namespace, calls: Calls) -> dict[str, Any]:
    """Train; return losses and gradients of every step."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    impl = arguments.impl
    model_parallel_cuda_manual_seed(11, force_reset_rng=True, **TRACKERS[arguments.tracker])
    torch.manual_seed(11)
    model = build(recompute, impl, arguments.precision, arguments.layers)
    weights = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
    step_of: Any = get_forward_backward_func()
    wrapper: Any = None
    if impl == "full_iteration":
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        wrapper = step_of = FullCudaGraphWrapper(step_of, cuda_graph_warmup_steps=2)
    helper: Any = None
    calls.count = 0
    # The same tracker object: layers have kept its methods.
    model_parallel_cuda_manual_seed(12, **TRACKERS[arguments.tracker])
    losses, gradients = [], []
    for number, step in enumerate(batches(arguments.steps)):
        if impl == "transformer_engine" and number == 2:
            from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

            helper = TECudaGraphHelper([model], model.config, SEQUENCE, BATCH)
            helper.create_cudagraphs()
        model.zero_grad_buffer()
        if helper is not None:
            for layer in model.modules():
                if hasattr(layer, "set_is_first_microbatch"):
                    layer.set_is_first_microbatch()
        results = step_of(
            forward_step_func=forward_step,
            data_iterator=iter(step),
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        losses.append(sum(float(result["loss"]) for result in results) / MICRO_BATCHES)
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients.append(torch.cat([p.main_grad.flatten() for p in parameters]).cpu())
        with torch.no_grad():
            for parameter in parameters:
                parameter.sub_(parameter.main_grad.to(parameter.dtype), alpha=0.05)
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.synchronize()
    if helper is not None:
        helper.delete_cuda_graphs()
    if wrapper is not None:
        wrapper.reset_cuda_graph()
    if impl == "local":
        from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

        delete_cuda_graphs()
    return {
        "losses": losses,
        "gradients": torch.stack(gradients),
        "peak": peak,
        "weights": weights,
        "calls": calls.count,
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--impl", choices=("none", "local", "transformer_engine", "full_iteration"), default="none")
    parser.add_argument("--precision", choices=list(PRECISION), default="bf16")
    parser.add_argument("--tracker", choices=list(TRACKERS), default="te")
    parser.add_argument("--recompute", default="none,full")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--patched", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.patched:
        import transformer_engine_ext

        report = transformer_engine_ext.patch(strict=True)
        if not report.replaced:
            raise SystemExit(f"nothing was replaced:\n{report}")
    import megatron.core.parallel_state as parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{arguments.out}/store.{os.getpid()}", rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    init_num_microbatches_calculator(0, None, MICRO_BATCHES * BATCH, BATCH, 1)
    torch.cuda.set_per_process_memory_fraction(0.06)
    if arguments.impl == "full_iteration":
        from megatron.core.full_cuda_graph import get_shared_capture_stream

        torch.cuda.set_stream(get_shared_capture_stream())  # or nodes of the warm-up refer to another stream
    elif arguments.impl == "transformer_engine":
        torch.cuda.set_stream(torch.cuda.Stream())
    # The first layers of a process warm up kernels, which draws random numbers.
    warm = argparse.Namespace(**{**vars(arguments), "impl": "none", "steps": 1})
    calls = Calls()
    train("none", warm, calls)
    for recompute in arguments.recompute.split(","):
        key = ".".join(
            [
                arguments.impl,
                arguments.precision,
                arguments.tracker,
                recompute,
                "patched" if arguments.patched else "unpatched",
            ]
        )
        torch.cuda.reset_peak_memory_stats()
        result: dict[str, Any]
        try:
            result = train(recompute, arguments, calls)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2500:]}
        torch.save(result, arguments.out / f"{key}.pt")
        gc.collect()
    os._exit(0)  # NCCL's teardown after a failed capture may hang


if __name__ == "__main__":
    main()
