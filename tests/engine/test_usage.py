"""The tail of a pass: what W ranks write, averaged, reads back as what they said."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.usage import RankReport, Standing, TailLayout


@st.composite
def meetings(draw):
    world = draw(st.integers(1, 9))
    layout = TailLayout(world, draw(st.integers(1, 12)), draw(st.integers(1, 5)))
    some_parameters = st.sets(st.integers(0, layout.parameters - 1)).map(sorted)
    reports = [
        RankReport(
            rank=rank,
            pass_number=draw(st.integers(1, (1 << 20) - 1)),
            plan_fingerprint=draw(st.integers(0, (1 << 20) - 1)),
            forwards=draw(st.integers(0, (1 << 20) - 1)),
            standing=draw(st.sampled_from(Standing)),
            buffer_forms=draw(st.integers(0, (1 << 20) - 1)),
            without_gradient=draw(some_parameters),
            unreached=draw(some_parameters),
            late_buckets=draw(st.sets(st.integers(0, layout.buckets - 1)).map(sorted)),
        )
        for rank in range(world)
    ]
    return layout, reports


@given(meetings(), st.sampled_from([torch.float32, torch.float64]))
def test_an_averaged_tail_reads_back_what_every_rank_wrote(meeting, dtype):
    layout, reports = meeting
    tails = []
    for report in reports:
        tail = torch.full((layout.numel,), 7.0, dtype=dtype)  # what an earlier pass left there
        layout.write(tail, report)
        tails.append(tail)
    verdict = layout.read(torch.stack(tails).sum(0) / layout.world_size)

    assert verdict.pass_numbers == [report.pass_number for report in reports]
    assert verdict.plan_fingerprints == [report.plan_fingerprint for report in reports]
    assert verdict.forwards == [report.forwards for report in reports]
    assert verdict.standings == [report.standing for report in reports]
    assert verdict.buffer_forms == [report.buffer_forms for report in reports]
    assert verdict.late_buckets == sorted({index for report in reports for index in report.late_buckets})
    everywhere = set.intersection(*[set(report.without_gradient) for report in reports])
    assert verdict.held_nowhere() == everywhere
    unused = {index for report in reports for index in report.unreached}
    assert verdict.unused_somewhere(layout.world_size) == {
        index: sum(index not in report.unreached for report in reports) for index in sorted(unused)
    }
