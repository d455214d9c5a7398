"""Measure which drafting context suits a model best: refresh layers, budget, and split.

Writes a profile, which engines use by themselves when they load the same model. --dataset should be like the text that the
model will see. An interrupted run goes on where it was when it is started again with the same options.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from aspire_llm.cli.numbers import whole_number
from aspire_llm.cli.options import comma_list
from aspire_llm.cli.output_file import OutputFile
from aspire_llm.cli.progress import ProgressBars
from aspire_llm.cli.workload import add_workload_options, load_workload
from aspire_llm.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from aspire_llm.analysis.search import ProfileSearch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="the profile (default: kept where engines find it by themselves)")
    parser.add_argument(
        "--budgets", metavar="N,N,…", help="sizes of the context to try (default 256,512,1024, as far as they fit)"
    )
    parser.add_argument("--starts", metavar="N", help="positions of each output to draft from (default 12)")
    parser.add_argument("--draft-tokens", metavar="N", help="length of each draft (default 16)")
    parser.add_argument("--batch-size", metavar="N", help="requests that will run at once, for the cost (default 8)")
    parser.add_argument(
        "--cost",
        metavar="FILE",
        help='JSON with "fixed", "per_token", "per_kv", "per_check" in seconds (default: this machine is timed)',
    )
    add_workload_options(parser)


def run(args: argparse.Namespace) -> None:
    starts = whole_number("--starts", args.starts or "12", 1)
    draft_tokens = whole_number("--draft-tokens", args.draft_tokens or "16", 1)
    batch_size = whole_number("--batch-size", args.batch_size or "8", 1)
    budgets = None
    if args.budgets is not None:
        budgets = tuple(whole_number("--budgets", part, 4) for part in comma_list(args.budgets))
        if not budgets:
            raise UserError(f"--budgets {args.budgets!r} names none")
    with OutputFile(args.out, "--out"), ProgressBars() as bars:  # (only tries whether it can be written)
        bars.show("loading", 0, 0)
        from aspire_llm import __version__
        from aspire_llm.analysis.saved_work import SavedWork
        from aspire_llm.analysis.search import Effort, ProfileSearch
        from aspire_llm.context.profile import kept_profile
        from aspire_llm.policy.simulator import read_cost

        cost = read_cost(args.cost).model() if args.cost is not None else None
        effort = Effort(budgets=budgets, starts=starts, draft_tokens=draft_tokens, batch_size=batch_size)
        workload = load_workload(args, effort.num_output)
        path = Path(args.out) if args.out is not None else kept_profile(workload.model.fingerprint)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the folder of profiles cannot be made: {path.parent}: {error.strerror}") from None
        search = ProfileSearch(workload.model, workload.prompts, effort, bars.show, cost)
        saved = SavedWork(path.with_name(f"{path.name}.unfinished"), search.settings())
        if saved.found:
            bars.print(f"going on from an interrupted run: {len(saved.found)} parts are done")
        about = {"aspire_llm": __version__, "dataset": workload.dataset, "seed": workload.seed}
        profile = search.run(saved, about)
        with OutputFile(str(path), "--out") as out:
            out.write_json(profile.model_dump(mode="json"))
        saved.remove()
        bars.stop()
        bars.print(candidates_table(search), f"profile: {path}")


def candidates_table(search: ProfileSearch) -> Table:
    from rich.table import Table

    table = Table("refresh layers", "budget", "verified", "recall", "accepted length", "speed-up", "at draft length")
    for result in search.ranked():
        split = result.candidate.split
        table.add_row(
            ", ".join(map(str, result.candidate.refresh_layers)),
            str(split.budget),
            f"{split.verified_share:g}",
            f"{result.recall:.4f}",
            f"{result.accepted_length:.2f}",
            f"{result.efficiency.speedup:.2f}",
            str(result.efficiency.draft_length),
        )
    return table
