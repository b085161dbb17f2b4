"""Everything a region's nodes can serve, where they are few: tables over all multisets of them.

Data: A_c nodes of configuration c; templates of node counts U and value a (the fraction of a demand that one covers).
State: a multiset M <= A, numbered sum_c M_c stride_c in mixed radix.
Closure: P(M) = max sum_t a_t x_t with sum_t U_t x_t <= M, x integer >= 0, by P(M) = max_t a_t + P(M - U_t).
Two closures side by side on M: least(P, Q)(M) = max over A <= M of min(P(A), Q(M - A)), and the same of sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coral_core.allocation.coverage import Floats, Ints

STATES_MAX = 262_144
"""Regions of more multisets than this are not tabulated."""
_CODE_BITS_MAX = 62


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLattice:
    """All multisets of a region's nodes. `configs` (k,): those held; `stride` (k,); `counts` (n, k); `codes` (n,)."""

    configs: Ints
    stride: Ints
    counts: Ints
    codes: Ints
    guard: int

    @classmethod
    def of(cls, held: Ints) -> NodeLattice | None:
        """The multisets of `held` (C,); None where there are more than `STATES_MAX`."""
        configs = np.flatnonzero(held > 0)
        radix = held[configs] + 1
        bits = np.array([int(most).bit_length() + 1 for most in held[configs]], dtype=np.int64)
        if float(np.prod(radix.astype(np.float64))) > STATES_MAX or bits.sum() > _CODE_BITS_MAX:
            return None
        stride = np.concatenate((np.ones(1, dtype=np.int64), np.cumprod(radix)))
        shift = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(bits)))
        counts = np.ascontiguousarray(np.arange(stride[-1])[:, None] // stride[:-1] % radix)
        return cls(
            configs=configs,
            stride=stride[:-1].copy(),
            counts=counts,
            codes=(counts << shift[:-1]).sum(axis=1),
            guard=sum(1 << int(end - 1) for end in shift[1:]),
        )

    def __len__(self) -> int:
        return len(self.codes)

    def states(self, nodes: Ints) -> Ints:
        """(n,): the states of node counts (n, C), all of them held."""
        return np.asarray(nodes[:, self.configs] @ self.stride)

    def nodes(self, states: Ints, n_configs: int) -> Ints:
        """(n, C): node counts of states."""
        found = np.zeros((len(states), n_configs), dtype=np.int64)
        found[:, self.configs] = self.counts[states]
        return found

    def below(self, state: int) -> Ints:
        """The states that fit into one."""
        return np.flatnonzero((self.counts <= self.counts[state]).all(axis=1))

    def least_states(self, table: Floats) -> Ints:
        """State 0, and every state that is worth more than it is with any one node less."""
        more = table > table[0]
        for c, stride in enumerate(self.stride.tolist()):
            some = np.flatnonzero(self.counts[:, c])
            more[some] &= table[some] > table[some - stride]
        more[0] = True
        return np.flatnonzero(more)

    def least_of(self, left: Floats, right: Floats) -> Floats:
        """(n,): most of min(left, right) over splits."""
        from coral_core.allocation.lattice_kernel import join_least  # noqa: PLC0415 - numba loads only when it pays

        some, other = self.least_states(left), self.least_states(right)
        if len(other) < len(some):
            some, left, right = other, right, left
        some = some[np.argsort(-left[some], kind="stable")]
        out = np.zeros(len(self))
        join_least(self.codes, self.guard, self.counts, self.stride, some, left[some], right, out)
        return out

    def sum_of(self, left: Floats, right: Floats) -> Floats:
        """(n,): most of left + right over splits."""
        from coral_core.allocation.lattice_kernel import join_sum  # noqa: PLC0415 - numba loads only when it pays

        some, other = self.least_states(left), self.least_states(right)
        if len(other) < len(some):
            some, left, right = other, right, left
        some = some[np.argsort(-left[some], kind="stable")]
        out = np.zeros(len(self))
        join_sum(self.codes, self.guard, self.counts, self.stride, some, left[some], right, out)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Closure:
    """Most that templates cover on each state: `table` (n,). `item_*` (i,): the templates that are of use for it."""

    lattice: NodeLattice
    table: Floats
    item_template: Ints
    item_state: Ints
    item_frac: Floats

    @classmethod
    def of(cls, lattice: NodeLattice, template: Ints, nodes: Ints, frac: Floats) -> Closure:
        """Of `template` (n,) with node counts (n, C), all within what is held, each covering `frac`."""
        from coral_core.allocation.lattice_kernel import close  # noqa: PLC0415 - numba loads only when it pays

        state = lattice.states(nodes)
        order = np.lexsort((-frac, state))
        order = order[np.concatenate(([True], np.diff(state[order]) > 0))] if len(order) else order
        state, frac = state[order], frac[order]
        kept, table = np.zeros(len(order), dtype=np.int64), np.zeros(len(lattice))
        kept = kept[: close(lattice.codes, lattice.guard, state, frac, kept, table)]
        return cls(
            lattice=lattice,
            table=table,
            item_template=template[order][kept],
            item_state=state[kept],
            item_frac=frac[kept],
        )

    def instances(self, state: int) -> dict[int, int]:
        """How often each template runs to cover the most on a state."""
        found: dict[int, int] = {}
        codes, guard = self.lattice.codes, self.lattice.guard
        while self.table[state] > 0:
            fits = np.flatnonzero(((codes[state] | guard) - codes[self.item_state]) & guard == guard)
            item = fits[np.argmax(self.item_frac[fits] + self.table[state - self.item_state[fits]])]
            template = int(self.item_template[item])
            found[template] = found.get(template, 0) + 1
            state -= int(self.item_state[item])
        return found
