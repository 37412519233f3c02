"""SeqFedEDT's rounds as plain loops (IEEE Transactions on Mobile Computing, 2025)."""

from collections.abc import Callable

import numpy as np
import torch

from tests.methods.reference.plain import Result, Setting, Weights, hits, train


def seqfededt(
    s: Setting, turns: Callable[[int, int], list[int]], score: str, q: float, only: str = ""
) -> Result:
    """turns: `turns(round, clients)`, the places of a cohort in their order. only: prefix of what
    can be personal.
    """
    result, model = Result(), s.initial
    names = [name for name, _ in s.module.named_parameters()]
    scored = [name for name in names if name.startswith(only)]
    own = [s.initial for _ in s.clients]
    seen = [False for _ in s.clients]

    def mixed(i: int) -> Weights:
        scores = {}
        for k in scored:
            w, last = model[k].numpy().astype(np.float64), own[i][k].numpy().astype(np.float64)
            scores[k] = {
                "difference": abs(w - last),
                "squared": (w - last) ** 2,
                "importance": abs(last * (w - last)),
            }[score]
        everything = np.sort(np.concatenate([v.ravel() for v in scores.values()]))
        at = int(np.floor(q * (len(everything) - 1)))
        if at + 1 < len(everything) and everything[at + 1] > 0:
            result.margins.append(float((everything[at + 1] - everything[at]) / everything[at + 1]))
        chosen = {k: torch.from_numpy(v > everything[at]) for k, v in scores.items()}
        result.counts.append(int(sum(c.sum() for c in chosen.values())))
        start = {
            k: torch.where(chosen[k], own[i][k], model[k]) if k in chosen else model[k]
            for k in names
        }
        return {**own[i], **start}  # whose statistics are the client's

    for t, cohort in enumerate(s.cohorts, 1):
        before, after = {}, {}
        for i in [cohort[place] for place in turns(t, len(cohort))]:
            start = mixed(i)
            before[i] = hits(s, start, i)
            own[i], seen[i] = train(s, start, t, i), True
            after[i] = hits(s, own[i], i)
            model = own[i]
        result.before.append([before[i] for i in cohort])
        result.after.append([after[i] for i in cohort])
        result.shared.append({k: model[k] for k in names})
        result.personal.append(
            [
                w if trained else {**w, **result.shared[-1]}
                for w, trained in zip(own, seen, strict=True)
            ]
        )
    return result
