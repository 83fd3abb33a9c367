"""Collectives counted in a program's text."""

import pytest

from jaxserve.plan.collectives import Collective, collectives_of

HLO = """HloModule jit_step

%add.1 (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%inner_condition (p: (s32[], f32[4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(3)
  ROOT %compare.1 = pred[] compare(%i, %limit), direction=LT
}

%inner_body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %reduce-scatter.1 = f32[2]{0} reduce-scatter(%x), replica_groups={{0,1}}, to_apply=%add.1
  ROOT %tuple.1 = (s32[], f32[4]) tuple(%i, %x)
}

%layer_condition (p: (s32[], bf16[8,16])) -> pred[] {
  %limit.2 = s32[] constant(5)
  ROOT %compare.2 = pred[] compare(%i, %limit.2), direction=LT
}

%layer (p: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %psum.1 = s8[16]{0} all-reduce(%x), channel_id=1, to_apply=%add.1
  %psum.2 = s8[16]{0} all-reduce(%x), channel_id=1, to_apply=%add.1
  %all-reduce.1 = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} all-reduce(%y), replica_groups={{0,1}}, to_apply=%add.1
  %all-gather-start.1 = (bf16[4,16]{1,0}, bf16[8,16]{1,0}) all-gather-start(%z), dimensions={0}
  %all-gather-done.1 = bf16[8,16]{1,0} all-gather-done(%all-gather-start.1)
  %fusion.1 = f32[8]{0} fusion(%q), kind=kLoop, calls=%starting
  %fusion.2 = f32[8]{0} fusion(%q), kind=kLoop, calls=%awaiting
  %while.1 = (s32[], f32[4]) while(%tuple.2), condition=%inner_condition, body=%inner_body
  ROOT %tuple.3 = (s32[], bf16[8,16]) tuple(%i, %all-reduce.1)
}

%starting (p: f32[2]) -> f32[8] {
  %all-gather.3 = f32[8]{0} all-gather(%p), channel_id=3, dimensions={0}
  ROOT %custom-call.1 = (f32[8]{0}, s32[2]) custom-call(%all-gather.3), custom_call_target="AsyncCollectiveStart"
}

%awaiting (p: f32[2]) -> f32[8] {
  ROOT %all-gather.4 = f32[8]{0} all-gather(%p), channel_id=3, dimensions={0}
}

%unknown_condition (p: (s32[])) -> pred[] {
  ROOT %compare.3 = pred[] compare(%i, %bound), direction=LT
}

%unknown_body (p: (s32[])) -> (s32[]) {
  %collective-permute.1 = f32[8]{0} collective-permute(%w), source_target_pairs={{0,1}}
}

%asked (p: f32[4]) -> f32[4] {
  ROOT %all-reduce.2 = (f32[4]{0}, s32[2]{0}) all-reduce(%u, %v), replica_groups={{0,1}}, to_apply=%add.1
}

%not_asked (p: f32[4]) -> f32[4] {
  ROOT %copy.1 = f32[4]{0} copy(%p)
}

ENTRY %main.1 (a: bf16[8,16]) -> bf16[8,16] {
  %while.2 = (s32[], bf16[8,16]) while(%tuple.4), condition=%layer_condition, body=%layer
  %while.3 = (s32[]) while(%tuple.5), condition=%unknown_condition, body=%unknown_body
  %while.4 = (s32[], f32[4]) while(%t), condition=%unknown_condition, body=%inner_body, backend_config=KNOWN
  %conditional.1 = f32[4] conditional(%pred, %p, %p), branch_computations={%not_asked, %asked}
  ROOT %get = bf16[8,16]{1,0} get-tuple-element(%while.2), index=1
}
""".replace("KNOWN", '{"known_trip_count":{"n":"7"}}')


def test_loops_multiply_and_what_is_only_sometimes_run_is_apart():
    found = {(each.kind, each.result): each for each in collectives_of(HLO)}
    assert found == {
        ("all-reduce", "bf16[8,16]"): Collective("all-reduce", "bf16[8,16]", 256, 5, False, 2),
        ("all-gather", "bf16[8,16]"): Collective("all-gather", "bf16[8,16]", 256, 5, False),
        # Two, though a traced function that is called twice gives both one channel.
        ("all-reduce", "s8[16]"): Collective("all-reduce", "s8[16]", 16, 10, False),
        # Written in two fusions, that starts it and that awaits it; it is one.
        ("all-gather", "f32[8]"): Collective("all-gather", "f32[8]", 32, 5, False),
        ("reduce-scatter", "f32[2]"): Collective("reduce-scatter", "f32[2]", 8, 5 * 3 + 7, False, 2),
        ("collective-permute", "f32[8]"): Collective("collective-permute", "f32[8]", 32, 1, False, trips_known=False),
        ("all-reduce", "f32[4] + s32[2]"): Collective("all-reduce", "f32[4] + s32[2]", 24, 1, True, 2),
    }
    assert collectives_of(HLO)[-1].conditional


def test_a_program_without_collectives_has_none():
    assert collectives_of("ENTRY %main (a: f32[2]) -> f32[2] {\n  ROOT %copy = f32[2]{0} copy(%a)\n}\n") == []


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all-reduce", 2 * 0.75 * 800), ("all-gather", 0.75 * 800), ("reduce-scatter", 0.75 * 3200), ("all-to-all", 600)],
)
def test_bytes_that_a_device_sends_in_a_ring_of_four(kind, sent):
    assert Collective(kind, "f32[100]", 400, 2, False).sent_bytes(4) == sent
    assert Collective(kind, "f32[100]", 400, 2, False, group=4).sent_bytes(8) == sent


def test_an_all_reduce_that_starts_yields_results_alone():
    line = "  %start = (f32[8,100], f32[8,90]) all-reduce-start(%a, %b), replica_groups=[2,4]<=[8], to_apply=%add"
    (found,) = collectives_of(f"ENTRY %main (a: f32[2]) -> f32[2] {{\n{line}\n}}\n")
    assert (found.bytes_each, found.group) == (6080, 4)
