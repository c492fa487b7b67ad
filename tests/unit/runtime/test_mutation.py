"""The tests of this folder notice small mistakes in the Runtime: at least 95 of 100 mutants are killed.

The survivors that are left, and why no test can kill them, are listed in survivors.md.
"""

from __future__ import annotations

import pytest

from ops.bench import mutation


@pytest.mark.full
@pytest.mark.timeout(2 * 3600)
def test_at_least_95_percent_of_the_mutants_are_killed(request):
    if not request.config.option.markexpr:
        pytest.skip("half an hour of both processors: ./ops/test --full, -m full, or python -m ops.bench.mutation")
    assert mutation.main([]) >= 0.95


def test_the_mutation_check_changes_every_kind_of_place_and_compiles_it():
    mutants = mutation.mutants_of("prism_core.transaction")
    assert len(mutants) > 150
    changes = "\n".join(mutant.change for mutant in mutants)
    for change in ("`self.check()` became `pass`", "became `return None`", "`now >= self._deadline` became `now >"):
        assert change in changes
    assert len({(mutant.line, mutant.change) for mutant in mutants}) > 0.95 * len(mutants)
