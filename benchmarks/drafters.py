"""Drafters side by side: a draft model, lookup, suffix, heads on the target's hidden states.

    python benchmarks/drafters.py --check
    python benchmarks/drafters.py --work drafters --temperatures 0

The head drafters (Medusa, Hydra, CTC, one layer) are trained on the training prompts, or read from `--work`; on two
cores each is trained within 10 minutes. For each drafter and temperature:

- tokens per target call: in the published tree of 63 nodes Medusa < Hydra < CTC, the order of the CTC-drafter's paper;
- by replay with the costs of this machine, the best fixed length, a learned length, the whole tree, and the tree
  policy, of which the last is at least 1.05 times as fast as the best static tree (Medusa and Hydra);
- live, in alternation with plain decoding: every lossless text is that of plain decoding, the rounds are those of
  replay, and predicted speeds are within 7%. Medusa's tree under `typical` acceptance is LOSSY;
- the best head is faster than the draft model.

The part `routes` has suffix and draft model, or `--drafters`, in one loop. A route is trained on the training prompts
(`--decide route`). Live, it is at least 1.05 times as fast as the better drafter alone at its best fixed length.
Batches of 4 have no bar.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections import defaultdict
from dataclasses import dataclass

from harness import MAX_TIES, Run, compare_rounds
from specstop.decode import Generation, Tally, load_drafter, with_drafter
from specstop.decode.benchmark import run_alternating, speed_ratio, texts_per_turn
from specstop.decode.drafters.spec import drafter_names, each_drafter
from specstop.decode.profile import CalibrationRun
from specstop.train import trace_arrays
from specstop.train.fit.route import tuned_rules
from specstop.train.fit.rules import best_of, fixed_grid

import specstop as ss

TRAINED = ("medusa", "hydra", "ctc", "layer")
DRAFTERS = ("model", "lookup", "suffix", *TRAINED)
DEPTH, TREE, SIZES = 4, "medusa-63", (8, 24, 63)
MINUTES, NODES, ERROR = 10.0, 1.05, 0.07
ROUTE_DEPTH, ROUTED, BATCH, MEMBERS = 8, 1.05, 4, 6


@dataclass(frozen=True)
class Setting:
    """A policy with its tree (None = chains), and the dense trace of the test prompts for it."""

    policy: ss.StopPolicy
    tree: str | None
    test: ss.Trace


class Calibrations(list[CalibrationRun]):
    """The calibration runs of each drafter of a pair."""

    def play(self, number: int) -> None:
        """See `CalibrationRun`."""
        for one in self:
            one.play(number)

    def profile(self) -> ss.Profile:
        """Return the profile with the costs of all drafters."""
        first, *others = (one.profile() for one in self)
        return dataclasses.replace(first, others=tuple(others))


def compare(run: Run) -> None:
    """Train and compare the drafters."""
    names = run.choose(DRAFTERS, ("model", "medusa"))
    specs = _trained(run, [name for name in names if name in TRAINED])
    for temperature in run.temperatures:
        where, per_call, speeds = f"T={temperature:g}", {}, {}
        for name in names:
            comparison = Comparison(run, with_drafter(run.pair, specs.get(name, name)), name, temperature)
            speeds[name], per_call[name] = comparison.live()
        order = [per_call[name] for name in TRAINED[:3] if name in per_call]
        if len(order) == 3:
            run.bar(f"{where}: Medusa, Hydra and CTC in order", float(order == sorted(order)), at_least=1.0)
        heads = {name: speed for name, speed in speeds.items() if name in TRAINED}
        if heads and "model" in speeds:
            best = max(heads, key=heads.__getitem__)
            run.bar(f"{where}: best head over the draft model", heads[best] / speeds["model"], at_least=1.0, note=best)


def _trained(run: Run, kinds: list[str]) -> dict[str, str]:
    """Return the spec of each trained drafter; texts of the target are shared between them."""
    folder, specs = run.work, {}
    for kind in kinds:
        started = time.process_time()
        if not (folder / kind).is_dir():
            work = folder / f"work-{kind}"
            earlier = next((path for path in folder.glob("work-*/texts*")), None)
            if not work.exists() and earlier is not None:
                shutil.copytree(earlier, work / earlier.name)
            ss.train_drafter(
                run.stock, run.prompts("train", run.choose(300, 4)), folder / kind, kind, depth=DEPTH,
                max_new_tokens=run.choose(128, 8), epochs=run.choose(None, 1), work=work,
            )  # fmt: skip
            minutes = (time.process_time() - started) / 60
            run.bar(f"{kind}: minutes of CPU time to train", minutes, at_most=2 * MINUTES)
        acceptance = load_drafter(folder / kind).metrics["acceptance"]
        run.row(
            f"{kind}: held-out acceptance of the first token", acceptance[0], " ".join(f"{a:.3f}" for a in acceptance)
        )
        specs[kind] = f"{kind}:{folder / kind}"
    return specs


class Comparison:
    """One drafter at one temperature."""

    depth, train_prompts, test_prompts = DEPTH, 64, 16

    def __init__(self, run: Run, pair: ss.Pair, name: str, temperature: float) -> None:
        self.run, self.pair, self.name, self.temperature = run, pair, name, temperature
        self.where, self.new = f"T={temperature:g}, {name}", run.choose(128, 6)
        self.tree: str | None = run.choose(TREE, "2,1")
        self.counts = run.choose({"train": self.train_prompts, "test": self.test_prompts}, {"train": 5, "test": 2})
        self.prompts = run.encoded("test", self.counts["test"])

    def settings(self, tree: str | None, verification: str = "match") -> ss.Settings:
        """Return the settings of a run."""
        return ss.Settings(self.temperature, self.new, self.depth, tree=tree, verification=verification)

    def traces(self, tree: str | None, label: str) -> dict[str, ss.Trace]:
        """Return the dense traces of both sides."""
        return self.run.traces(
            f"{self.where}-{label}", self.counts, self.pair, depth=self.depth, tree=tree, temperature=self.temperature,
            max_new_tokens=self.new, draft=self.name,
        )  # fmt: skip

    def profile(self) -> ss.Profile:
        """Return the costs."""
        return self.run.profile(self.pair, depth=self.depth, tree=self.tree, temperature=self.temperature)

    def choose(self) -> tuple[dict[str, Setting], ss.Profile]:
        """Return settings that are chosen on training prompts, and the costs."""
        run, profile = self.run, self.profile()
        chains = self.traces(None, "chain")
        fixed = [ss.load_policy(f"fixed:{k}") for k in range(1, DEPTH + 1)]
        best = max(fixed, key=lambda policy: ss.replay(chains["train"], policy, profile).rate)
        length = ss.train(chains["train"], profile, head="logistic", name="length").policy
        settings = {
            "best fixed length": Setting(best, None, chains["test"]),
            "learned length": Setting(length, None, chains["test"]),
        }
        if not run.smoke:
            trees = self.traces(self.tree, "tree")
            result = ss.train(trees["train"], profile, rule="gain", name="nodes", nodes=SIZES)
            shape = str(result.metrics["tree"])
            settings["whole tree"] = Setting(ss.load_policy(f"fixed:{DEPTH}"), self.tree, trees["test"])
            settings["learned nodes"] = Setting(result.policy, shape, self.traces(shape, "nodes")["test"])
        profile = self.with_decisions(profile, list(settings.values()))
        if "learned nodes" in settings:
            nodes = settings["learned nodes"]
            report = ss.evaluate(nodes.test, profile, [nodes.policy])
            ratio = report[nodes.policy.shown_name].speedup
            key = f"{self.where}: learned nodes over the best static tree"
            if self.name in TRAINED[:2]:
                run.bar(key, ratio, at_least=NODES)
            else:
                run.row(key, ratio)
        return settings, profile

    def with_decisions(self, profile: ss.Profile, settings: list[Setting]) -> ss.Profile:
        """Return the profile with the costs of decisions, timed in the loop."""
        for one in settings:
            profile = self.run.with_decisions(profile, [one.policy], self.settings(one.tree), self.pair)
        return profile

    def live(self) -> tuple[float, float]:
        """Decode all settings in alternation; return the speed of the fastest, and the most tokens per target call."""
        settings, costs = self.choose()
        texts = self.decode(settings, costs)
        speeds = [speed_ratio(texts[name], texts["plain"]).value for name in settings]
        return max(speeds), max(Tally(texts[name]).block_efficiency for name in settings)

    def decode(self, settings: dict[str, Setting], costs: ss.Profile, batch: int = 1) -> dict[str, list[Generation]]:
        """Decode all settings in alternation with plain decoding; add rows and bars, and return the texts."""
        run, where = self.run, self.where + (f", batch {batch}" if batch > 1 else "")
        plain = Setting(ss.load_policy("fixed:0"), None, next(iter(settings.values())).test)
        settings = {"plain": plain, **settings}
        ids = run.ids("train", run.choose(16, 2))
        calibration = Calibrations(
            CalibrationRun(
                one, ids, depth=self.depth, temperature=self.temperature, tree=self.tree, verification="match",
                new_tokens=run.choose(48, 8),
            ) for one in (each_drafter(self.pair) if batch == 1 else ())
        )  # fmt: skip
        for number in run.choose(range(4), (1,)):
            calibration.play(number)
        methods = {
            name: ss.Speculator(self.pair, one.policy, self.settings(one.tree), costs, batch=batch)
            for name, one in settings.items()
        }
        if self.temperature > 0 and self.name == "medusa":
            lossy = self.settings(self.tree, "typical")
            methods["typical (LOSSY)"] = ss.Speculator(self.pair, ss.load_policy(f"fixed:{DEPTH}"), lossy, costs)
        rows = run_alternating(list(methods.values()), self.prompts, calibration=calibration, batch=batch)
        texts = dict(zip(methods, rows, strict=True))
        profile = calibration.profile().with_decisions(costs.decision_s) if batch == 1 else costs
        base = ss.replay(plain.test, plain.policy, profile).rate
        wrong, different, total, errors = 0, 0, 0, []
        for name, row in texts.items():
            speed = speed_ratio(row, texts["plain"], texts_per_turn(batch))
            note = f"{Tally(row).block_efficiency:.2f} tokens per target call"
            if name in settings:
                one = settings[name]
                error = (ss.replay(one.test, one.policy, profile).rate / base) / speed.value - 1
                compared, unequal = compare_rounds(one.test, one.policy, costs, row)
                total, different = total + compared, different + unequal
                wrong += sum(a.tokens != b.tokens for a, b in zip(row, texts["plain"], strict=True))
                if batch == 1:  # the profile has no costs of batches
                    errors.append(error)
                    note += f", {error:+.1%} predicted"
            run.row(f"{where}, {name}: of plain decoding", speed, note)
        ties = max(1, len(rows[0]) / 50), max(1, total * MAX_TIES)
        run.bar(f"{where}: texts that differ from plain decoding", wrong, at_most=ties[0], always=True)
        run.bar(f"{where}: rounds that differ from replay", different, at_most=ties[1], always=True, note=f"of {total}")
        if errors:
            run.bar(f"{where}: largest error of a prediction", max(map(abs, errors)), at_most=ERROR)
        return texts


class RouteComparison(Comparison):
    """Two drafters in one loop."""

    train_prompts, test_prompts = 160, 40

    def choose(self) -> tuple[dict[str, Setting], ss.Profile]:
        """Return each drafter at its best fixed length, the best tuned rule and the trained route, and the costs."""
        self.depth, self.tree, names = self.run.choose(ROUTE_DEPTH, 3), None, drafter_names(self.pair.drafter)
        profile, traces = self.profile(), self.traces(None, "routes")
        arrays = trace_arrays(traces["train"])
        grid = fixed_grid(arrays, profile)
        best = [best_of([one for one in grid if one.policy.drafter == name]).policy for name in names]
        rule = best_of([ss.replay(arrays, one, profile) for one in tuned_rules(arrays, profile) if one.features]).policy
        route = ss.train(
            traces["train"], profile, decide="route", name="route", report_share=0.0, folds=self.run.choose(5, 2)
        ).policy
        policies = {**dict(zip(names, best, strict=True)), "rule": rule, "route": route}
        settings = {name: Setting(policy, None, traces["test"]) for name, policy in policies.items()}
        profile = self.with_decisions(profile, [settings["rule"], settings["route"]])
        report = ss.evaluate(traces["test"], profile, [*{one.shown_name: one for one in (rule, route)}.values()])
        for name, policy in (("rule", rule), ("route", route)):
            speed = report[policy.shown_name].speedup
            self.run.row(f"{self.where}, {name}: of the best fixed length, held out", speed, policy.name)
        return settings, profile

    def compare(self) -> None:
        """Decode with the route and with each drafter alone, in batches and in single texts."""
        settings, costs = self.choose()
        for batch in (BATCH, 1):
            rows = self.decode(settings, costs, batch)
            one = max(drafter_names(self.pair.drafter), key=lambda name: Tally(rows[name]).tokens_per_s)
            speed = speed_ratio(rows["route"], rows[one], texts_per_turn(batch))
            if batch > 1:
                self.run.row(f"{self.where}, batch {batch}: route over {one} alone", speed)
                continue
            self.run.bar(f"{self.where}: route over {one} alone", speed, at_least=ROUTED, above=1.0)
            by_group = defaultdict[str | None, list[int]](list)
            for at, prompt in enumerate(self.run.prompts("test", self.counts["test"])):
                by_group[prompt.group].append(at)
            for group, members in by_group.items():
                if group and len(members) >= MEMBERS:
                    speed = speed_ratio(*([rows[name][at] for at in members] for name in ("route", one)))
                    self.run.row(f"{self.where}: route over {one} alone, {group}", speed)


def routes(run: Run) -> None:
    """Train a route between two drafters, and compare it with each of them."""
    pair = with_drafter(run.pair, run.options.drafters)
    for temperature in run.temperatures:
        RouteComparison(run, pair, pair.drafter, temperature).compare()


if __name__ == "__main__":
    raise SystemExit(Run(__doc__, [compare, routes]).execute())
