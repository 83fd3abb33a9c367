"""compile_check: what fails, what is refused, what counts as proven; and a compile per target."""

from __future__ import annotations

import pytest

from pallas_kernels.common.deviceless import TARGETS, missing
from pallas_kernels.common.static_measures import Measures, gpu_loop, take, tpu_loop
from pallas_kernels.paged_attention import compile_check
from pallas_kernels.paged_attention.compile_check import check, interpret, main, roofline_share, table
from pallas_kernels.paged_attention.specs import SPECS

SPEC = {spec.name: spec for spec in SPECS}
DECODE, PREFILL = SPEC["llama-3-8b decode"], SPEC["llama-3-8b prefill"]
SASS = """
.L_x_1:
   -:-:-:Y:01        /*0000*/                   LDC R1, c[0x0][0x28]
.L_x_2:
   -:-:-:Y:01        /*0010*/                   HMMA.16816.F32.BF16 R8, R4, R12, R8
   -:-:-:Y:01        /*0020*/                   FADD R1, R2, R3
   -:-:-:Y:05        /*0030*/               @P1 BRA `(.L_x_2)
.L_x_3:
   -:-:-:Y:05        /*0040*/               @P1 BRA `(.L_x_3)
   -:-:-:Y:05        /*0050*/               @P1 BRA `(.L_x_1)
"""
BUNDLES = """
     0x0   :  { %1 = nop }
     0x1   : > { %2 = sld [smem:[#a]] }
     0x2 LB: >> { %3 = vmatmul.bf16.gmra.mxu0 %v1 }
     0x3   : >> { %4 = vadd.f32 %v1, %v2 }
     0x4   : > { %5 = sbr.rel target = $region1 }
"""


def test_the_loop_is_the_shortest_one_with_matrix_products():
    assert gpu_loop(SASS) == 3
    assert gpu_loop(SASS.replace("HMMA", "FMUL")) == 0
    assert tpu_loop(BUNDLES) == 2
    assert tpu_loop(BUNDLES.replace("vmatmul", "vmul")) == 0


def test_measures_are_taken_once(tmp_path):
    (tmp_path / "body_0.ptxas").write_text("4 bytes spill stores, 8 bytes spill loads\nUsed 130 registers, used 2")
    (tmp_path / "body_0.resources.txt").write_text("Resources(smem_scratch_bytes=109568, x)")
    (tmp_path / "body_0.sass_ctrl").write_text(SASS)
    assert take(tmp_path) == [Measures(registers=130, spilled=12, smem_bytes=109568, instructions=6, loop=3)]
    assert take(tmp_path) == []


def test_spills_on_gpu_and_copies_of_the_pool_fail():
    gpu, tpu = TARGETS["sm_90a"], TARGETS["v5e"]
    verdict = compile_check._verdict
    assert verdict(gpu, DECODE, 0, (Measures(instructions=1000),)) == "compiled, not run"
    assert verdict(gpu, DECODE, 0, (Measures(spilled=1, instructions=1000),)) == "FAILED: 1 bytes spilled"
    assert verdict(tpu, DECODE, 0, (Measures(spilled=126, instructions=1000),)) == "compiled, not run"
    assert "it is copied" in verdict(gpu, DECODE, DECODE.pool_bytes("mosaic_gpu"), ())


def test_the_share_compares_a_turns_bytes_with_its_instructions():
    """64 tokens are 32 KiB for a KV head; at 4.8 TB/s over 132 multiprocessors that takes 1,784 clocks."""
    assert roofline_share(TARGETS["sm_90a"], DECODE, Measures(loop=3568)) == pytest.approx(0.5, rel=0.01)
    assert roofline_share(TARGETS["sm_90a"], DECODE, Measures(loop=100)) == 1.0
    assert roofline_share(TARGETS["sm_90a"], DECODE, Measures()) is None


def test_the_share_follows_the_block_sizes_of_the_kernel():
    """8 heads by 256 tokens are 1 MiB: at 0.82 TB/s 1,918 clocks. 64 query rows by 64 tokens: 554 clocks."""
    assert roofline_share(TARGETS["v5e"], DECODE, Measures(loop=3836)) == pytest.approx(0.5, rel=0.01)
    assert roofline_share(TARGETS["sm_90a"], PREFILL, Measures(loop=1108)) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "mosaic_tpu"])
def test_a_small_case_is_interpreted(implementation):
    assert interpret(implementation, prefill=False).state == "ran (interpreted, races checked)"


def test_nothing_is_claimed_without_the_compiler(monkeypatch, capsys):
    monkeypatch.setattr(compile_check, "missing", lambda target: "libtpu is not installed")
    proof = check(TARGETS["v5e"], DECODE)
    assert proof.state == "not looked at: libtpu is not installed"
    assert not proof.failed
    assert "not looked at" in table([proof])
    with pytest.raises(SystemExit):
        main(["--targets=v1"])
    assert "--targets has v1; known are v5e" in capsys.readouterr().err


@pytest.mark.tpu_compile
def test_the_kernel_that_writes_is_looked_at_too():
    target = TARGETS["v5e"]
    if missing(target):
        pytest.skip(missing(target))
    assert check(target, PREFILL, writes=True).state == "compiled, not run"
    assert check(target, SPEC["llama-3-8b decode int8"], writes=True).state.startswith("refused: the pool is int8")


@pytest.mark.parametrize(
    "target",
    [pytest.param(t, marks=getattr(pytest.mark, f"{'t' if t.platform == 'tpu' else 'g'}pu_compile"), id=t.name)
     for t in TARGETS.values()],
)  # fmt: skip
@pytest.mark.parametrize("spec", [DECODE, PREFILL, SPEC["beyond 2**31 elements decode"]], ids=lambda spec: spec.name)
def test_kernels_compile_for_every_target_without_a_copy_of_the_pool(target, spec):
    proof = check(target, spec)
    if proof.state.startswith("not looked at"):
        pytest.skip(proof.state)
    assert proof.state == "compiled, not run"
