# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker of test_verify_ranks.py: what verify() finds and mends on two or four ranks."""

from __future__ import annotations

import random
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _ranks import run_cases
from _verify_tools import CountedMessages, everywhere, fails_alike, mesh_of, table_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import dropout

from transformer_engine_ext.errors import LayoutMismatchError, SeedCollisionWarning, UnknownAxisWarning
from transformer_engine_ext.pytorch.distributed import (
    ParallelRNG,
    StreamSpec,
    from_megatron,
    megatron_streams,
    verify,
)

BEFORE: list[ParallelRNG] = []  # made when there is no process group yet


def case_d1_extra_draw() -> None:
    rng = ParallelRNG(mesh_of(dp=dist.get_world_size() // 2, tp=2), device="cpu")
    rng.seed(50)
    rng.verify()
    torch.rand(7)
    rng.verify()
    rank = dist.get_rank()
    if rank == 1:
        torch.rand(1)
    text = fails_alike(rng.verify)
    assert "default: ranks 0 (dp 0, tp 0), 1 (dp 0, tp 1) stand at positions 7, 8, and must be in lockstep" in text
    rows = table_of(text)
    assert rows[0] == ["0", "0", "50 +7 *"]
    assert rows[1] == ["0", "1", "50 +8 *"]
    assert "verify(repair='broadcast')" in text
    fails_alike(lambda: rng.verify(axes=("tp",)))
    rng.verify(axes=("dp",))
    rng.verify(axes=[])


def case_d1_stages_stand_elsewhere() -> None:
    sizes = {"pp": 2, "tp": dist.get_world_size() // 2}
    mesh = mesh_of(**sizes)
    rng = ParallelRNG(mesh, device="cpu")
    rng.seed(1)
    stage = mesh.get_local_rank("pp")
    torch.rand(1 + 5 * stage)
    with rng.tracker.fork("data-parallel-rng"):
        torch.rand(1 + stage)
    with rng.tracker.fork():
        torch.rand(1 + dist.get_rank())
    rng.verify()


def case_d2_seeded_alike_where_it_must_vary() -> None:
    # Every rank believes that it is alone on tp, so all get the same model-parallel seed.
    rng = ParallelRNG(mesh_of(dp=dist.get_world_size() // 2, tp=2), device="cpu")
    alone = ParallelRNG({}, tracker=rng.tracker, device="cpu")
    rng.seed(3)
    rng.verify()
    alone.seed(3)
    text = fails_alike(rng.verify)
    named = (
        r"model-parallel-rng: ranks 0 \(dp 0, tp 0\), 1 \(dp 0, tp 1\).* have one seed, and the stream varies over tp"
    )
    assert re.search(named, text)
    assert table_of(text)[1][2].startswith("2721 ")
    text = fails_alike(lambda: rng.verify(repair="broadcast"))  # nothing to copy from
    rng.verify(axes=("dp",))
    rng.seed(3)
    rng.verify()


def case_d2_seeded_with_different_numbers() -> None:
    rng = ParallelRNG(mesh_of(dp=dist.get_world_size() // 2, tp=2), device="cpu")
    odd = dist.get_world_size() - 1
    rng.seed(3 if dist.get_rank() != odd else 30)
    text = fails_alike(rng.verify)
    for name in ("default", "data-parallel-rng"):
        assert f"  - {name}: rank" in text
    assert re.search(rf"- default: ranks? .*{odd} \(", text)
    assert rng.verify(repair="broadcast")
    rng.verify()
    default = {int(cell) for cell in everywhere(torch.initial_seed())}
    assert default == {3}


def case_the_check_is_one_small_message() -> None:
    rng = ParallelRNG(mesh_of(tp=dist.get_world_size()), device="cpu")
    rng.seed(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = CountedMessages(monkeypatch)
        rng.verify()
        assert counted.names == ["total"]
        assert counted.sent == 32
    # Seeds that seed() did not set: one report of all ranks, after which the small message does again.
    other = ParallelRNG(mesh_of(tp=dist.get_world_size()), tracker=rng.tracker, device="cpu")
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = CountedMessages(monkeypatch)
        other.verify()
        assert counted.names == ["total", "gather", "broadcast"]
        assert counted.sent < 3000
        other.verify()
        assert counted.names[3:] == ["total"]


def case_repair_is_in_place() -> None:
    rng = ParallelRNG(mesh_of(dp=dist.get_world_size() // 2, tp=2), device="cpu")
    rng.seed(8)
    handles = dict(rng.tracker.states_)
    rank = dist.get_rank()
    torch.rand(3 + rank // 2)  # dp ranks may stand apart, tp ranks may not
    expected = torch.get_rng_state()
    if rank == 1:
        torch.rand(2)
        with rng.tracker.fork("data-parallel-rng"):
            torch.rand(1)
    with rng.tracker.fork():
        torch.rand(rank + 1)
    model = rng.states()["model-parallel-rng"]
    fails_alike(rng.verify)
    assert rng.verify(repair="broadcast") == ("default", "data-parallel-rng")
    assert rng.verify(repair="broadcast") == ()
    rng.verify()
    assert torch.equal(torch.get_rng_state(), expected)  # that of tp rank 0, which had not drawn too much
    assert torch.equal(rng.states()["model-parallel-rng"], model)
    assert all(rng.tracker.states_[name] is handle for name, handle in handles.items())


def case_every_nth_step() -> None:
    rng = ParallelRNG(mesh_of(tp=dist.get_world_size()), device="cpu")
    rng.seed(8)
    hook = rng.every(3)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    optimizer.register_step_post_hook(hook)
    parameter.grad = torch.ones(2)
    if dist.get_rank() == 0:
        torch.rand(1)
    optimizer.step()
    optimizer.step()
    fails_alike(lambda: optimizer.step())
    assert hook.calls == 3
    with pytest.raises(ValueError, match="repair='zz' is not available"):
        rng.every(2, repair="zz")
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="at least 1"):
            rng.every(wrong)  # type: ignore[arg-type]


def case_the_ranks_must_check_the_same() -> None:
    mesh = mesh_of(tp=dist.get_world_size())
    last = dist.get_rank() == dist.get_world_size() - 1
    streams = megatron_streams(data_parallel_random_init=last)
    rng = ParallelRNG(mesh, streams, device="cpu")
    rng.seed(1)
    text = fails_alike(rng.verify, LayoutMismatchError)
    assert "streams is " in text
    assert f"differs on ranks {dist.get_world_size() - 1})" in text
    fails_alike(lambda: ParallelRNG(mesh, device="cpu").verify(axes=("tp",) if last else None), Exception)


def case_what_fails_on_one_rank_fails_on_all() -> None:
    rng = ParallelRNG(mesh_of(tp=dist.get_world_size()), device="cpu")
    rng.seed(1)
    kind, text = RuntimeError, "cannot verify the streams inside tracker.fork('model-parallel-rng')"
    if dist.get_rank() == 1:
        with rng.tracker.fork(), pytest.raises(kind, match=re.escape(text)):
            rng.verify()
    else:
        with pytest.raises(kind, match="rank 1: " + re.escape(text)):
            rng.verify()
    rng.verify()


def case_arguments_that_only_one_rank_gets_wrong() -> None:
    rng = ParallelRNG(mesh_of(tp=dist.get_world_size()), device="cpu")
    rng.seed(1)
    last = dist.get_rank() == dist.get_world_size() - 1
    for wrong, kind, text in (
        ({"repair": "zz"}, ValueError, "repair='zz' is not available"),
        ({"axes": ("zz",)}, ValueError, "axes names 'zz'"),
        ({"axes": "tp"}, TypeError, "axes is a sequence"),
    ):
        where = "" if last else f"rank {dist.get_world_size() - 1}: "
        with pytest.raises(kind, match=re.escape(where + text)):
            rng.verify(**(wrong if last else {}))  # type: ignore[arg-type]
    rng.verify()  # and nobody is left waiting


def case_built_before_the_process_group() -> None:
    (before,) = BEFORE
    before.seed(1)
    for call in (before.verify, lambda: before.save("never"), lambda: before.load("never"), before.state_dict):
        with pytest.raises(RuntimeError, match=r"was ended or initialised anew .*then: rank 0 of 1, now \d in all"):
            call()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dist, "is_initialized", lambda: False)
        before.verify()  # alone, as it was
    unnamed = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    with pytest.warns(UnknownAxisWarning) if dist.get_rank() == 0 else nullcontext():
        ParallelRNG(unnamed, device="cpu")


def case_a_verdict_that_fails_on_rank_0() -> None:
    rng = ParallelRNG(mesh_of(tp=dist.get_world_size()), device="cpu")
    rng.seed(1)
    torch.rand(1 + dist.get_rank())

    def broken(*arguments: object) -> bytes:
        raise KeyError("torn")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(verify, "judge", broken)
        with pytest.raises(KeyError, match="torn"):
            rng.verify()
    fails_alike(rng.verify)


def in_order(groups: dict[str, dist.ProcessGroup], reverse: bool) -> dict[str, dist.ProcessGroup]:
    return dict(reversed(groups.items())) if reverse else groups


def case_the_axes_in_another_order() -> None:
    # Two ranks: an axis of size 1. Four: the same ranks, dp inner or outer, so that they do stand at other places.
    last = dist.get_rank() == dist.get_world_size() - 1
    sizes = {"dp": dist.get_world_size() // 2, "tp": 2}
    straight, turned = mesh_of(**sizes), mesh_of(**dict(reversed(sizes.items())))
    groups = {axis: straight.get_group(axis) for axis in sizes}
    rng = ParallelRNG(in_order(groups, last), device="cpu")
    rng.seed(1)
    rng.verify()
    ParallelRNG(in_order(groups, last), tracker=rng.tracker, device="cpu").verify()  # by a report of all ranks
    if dist.get_rank() == 1:
        torch.rand(1)
    rows = table_of(fails_alike(rng.verify))
    assert rows[1][:2] == ["0", "1"]
    rng = ParallelRNG(turned if last else straight, device="cpu")  # at a corner, where both agree
    rng.seed(1)
    rng.verify(axes=[])
    more = ParallelRNG({**groups, "x": groups["tp"]} if last else groups, device="cpu")
    more.seed(1)
    assert "axes is {'dp': " in fails_alike(more.verify, LayoutMismatchError)


def case_other_ways_to_name_the_axes() -> None:
    # The same ranks as groups, as one mesh and as two, expert parallelism folded over dp x tp: one layout.
    world = dist.get_world_size()
    dense, expert = mesh_of(dp=world // 2, tp=2), mesh_of(edp=1, ep=world)
    groups = {**{axis: dense.get_group(axis) for axis in ("dp", "tp")}, "ep": expert.get_group("ep")}
    layouts = []
    for topology in (groups, [dense, expert], (dense, expert)):
        rng = ParallelRNG(topology, device="cpu")
        rng.seed(1)
        rng.verify()
        layouts.append({name: rng.layout.coordinates[name] for name in groups})
        assert rng.layout.everyone is not None
        assert rng.layout.everyone[dist.get_rank()].tolist() == list(rng.layout.coordinates.values())
        assert {rng.tracker.states_["expert-parallel-rng"].initial_seed()} == {1025 + 100 * dist.get_rank()}
    assert layouts[0] == layouts[1] == layouts[2]
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_data_parallel_group=lambda: groups["dp"],
        get_tensor_model_parallel_group=lambda: groups["tp"],
        get_expert_model_parallel_group=lambda: groups["ep"],
    )
    assert from_megatron(state) == groups
    with pytest.raises(ValueError, match="two meshes name the axis 'tp'"):
        ParallelRNG(
            [dense, mesh_of(tp=world)] if world > 2 else [dense, DeviceMesh("cpu", [1, 0], mesh_dim_names=("tp",))]
        )
    odd = {"tp": dist.group.WORLD, "x": None}
    with pytest.raises(TypeError, match="axis 'x' needs"):
        ParallelRNG(odd, device="cpu")  # type: ignore[arg-type]


def masks(rng: ParallelRNG, stream: str | None) -> list[Tensor]:
    ones = torch.ones(400)
    if stream is None:
        mine = dropout(ones, 0.5)
    else:
        with rng.tracker.fork(stream):
            mine = dropout(ones, 0.5)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return found


def case_d3_masks_by_declaration() -> None:
    # Alike or not, pair by pair, by what each stream says; 2 x 2 on four ranks.
    mesh = mesh_of(dp=2, tp=2)
    streams = [
        *megatron_streams(),
        StreamSpec("per replica", ("dp",), seed_offset=5000),
        StreamSpec("per rank", ("dp", "tp"), seed_offset=6000),
    ]
    for derivation in ("megatron", "fold_in"):
        rng = ParallelRNG(mesh, streams, derivation=derivation, device="cpu")
        rng.seed(50)
        for name, (over_dp, over_tp) in {
            None: (True, True), "data-parallel-rng": (True, True), "model-parallel-rng": (True, False),
            "per replica": (False, True), "per rank": (False, False),
        }.items():  # fmt: skip
            found = masks(rng, name)
            for rank in range(4):
                assert torch.equal(found[rank], found[rank ^ 2]) == over_dp, (derivation, name, rank)
                assert torch.equal(found[rank], found[rank ^ 1]) == over_tp, (derivation, name, rank)
        rng.verify()


def case_d2_seeds_that_meet_across_ranks() -> None:
    # Stage 1 ep 0 and stage 0 ep 1; with fold_in none meet.
    mesh = mesh_of(pp=2, ep=2)
    rng = ParallelRNG(mesh, device="cpu")
    if dist.get_rank() == 0:
        with pytest.warns(
            SeedCollisionWarning, match=r"expert-parallel-rng at pp 0, ep 1 +expert-parallel-rng at pp 1"
        ):
            rng.seed(0)
    else:
        rng.seed(0)
    rng.verify()
    hashed = ParallelRNG(mesh, derivation="fold_in", device="cpu")
    hashed.seed(0)
    hashed.verify()
    seeds = everywhere([handle.initial_seed() for handle in hashed.tracker.states_.values()])
    assert len({row[2] for row in seeds}) == 4  # type: ignore[index]


def case_a_majority_tells_who_stands_out() -> None:
    rng = ParallelRNG(mesh_of(tp=4), device="cpu")
    rng.seed(5)
    if dist.get_rank() == 2:
        torch.rand(1)
    text = fails_alike(rng.verify)
    assert "default: rank 2 (tp 2) stands elsewhere than rank 0, and must be in lockstep along tp" in text
    assert [row[1].endswith("*") for row in table_of(text).values()] == [False, False, True, False]
    assert rng.verify(repair="broadcast") == ("default",)
    assert {float(value) for value in everywhere(torch.rand(1).item())} == {
        torch.rand(1, generator=torch.Generator().manual_seed(5)).item()
    }


def case_host_generators_are_streams() -> None:
    rng = ParallelRNG(mesh_of(tp=dist.get_world_size()), include=("python", "numpy"), device="cpu")
    rng.seed(9)
    drawn = (random.random(), np.random.rand())
    assert set(everywhere(drawn)) == {(random.Random(9).random(), np.random.RandomState(9).rand())}
    if dist.get_rank() == 0:
        random.random()  # a data loader on one rank
        np.random.rand()
    rng.verify()


CASES_2 = {
    "d1 extra draw": case_d1_extra_draw,
    "d1 stages stand elsewhere": case_d1_stages_stand_elsewhere,
    "d2 seeded alike where it must vary": case_d2_seeded_alike_where_it_must_vary,
    "d2 seeded with different numbers": case_d2_seeded_with_different_numbers,
    "the check is one small message": case_the_check_is_one_small_message,
    "repair is in place": case_repair_is_in_place,
    "every nth step": case_every_nth_step,
    "the ranks must check the same": case_the_ranks_must_check_the_same,
    "what fails on one rank fails on all": case_what_fails_on_one_rank_fails_on_all,
    "arguments that only one rank gets wrong": case_arguments_that_only_one_rank_gets_wrong,
    "built before the process group": case_built_before_the_process_group,
    "a verdict that fails on rank 0": case_a_verdict_that_fails_on_rank_0,
    "the axes in another order": case_the_axes_in_another_order,
    "other ways to name the axes": case_other_ways_to_name_the_axes,
    "host generators are streams": case_host_generators_are_streams,
}
CASES_4 = {
    "d3 masks by declaration": case_d3_masks_by_declaration,
    "d2 seeds that meet across ranks": case_d2_seeds_that_meet_across_ranks,
    "a majority tells who stands out": case_a_majority_tells_who_stands_out,
}

if __name__ == "__main__":
    BEFORE.append(ParallelRNG(None, device="cpu"))
    run_cases({**CASES_2, **(CASES_4 if sys.argv[1:] == ["4"] else {})})
