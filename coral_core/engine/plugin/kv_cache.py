"""The KV caches of one worker, read and written token by token in one order of elements, whatever the engine's own layout.

vLLM's logical shape is [block, head, token, content]. On GPUs the content of a token lies together. The CPU's attention kernels
keep it in another order inside a block (keys transposed, or packed for matrix units), which depends on dtype, block size and
processor: `packed_order` finds it out by letting the kernel itself write numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from vllm import _custom_ops as ops

from coral_core.engine.plugin.kv_plan import Chunk, PlanError, Range

_DIGITS: Final = 100
"""Numbers up to this are exact in every dtype of a cache."""


class PagedCache:
    """`caches`: layer -> [block, head, token, content], of equal shapes; this worker holds the KV heads `heads` of the model.

    `order`: [token, content], where each element lies within a block's [token x content]; None where it lies in that order.
    """

    def __init__(self, caches: Mapping[int, torch.Tensor], heads: Range, order: torch.Tensor | None) -> None:
        self._caches, self._heads = caches, heads
        self._order = None if order is None else order.numpy()
        self._block_tokens = next(iter(caches.values())).shape[2]
        cuda = next(iter(caches.values())).is_cuda
        self._stream = torch.cuda.Stream() if cuda else None

    def read(self, chunk: Chunk, slots: npt.NDArray[np.int64]) -> memoryview:
        """A copy of the chunk's elements, [token, head, content], as bytes."""
        cache = self._cache(chunk)
        with torch.cuda.device_of(cache), torch.cuda.stream(self._stream):  # threads begin with the first device
            found = cache[self._where(chunk, slots, cache.device)]
            if self._stream is not None:
                staged = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
                staged.copy_(found, non_blocking=True)
                self._stream.synchronize()
                found = staged
        return memoryview(found.contiguous().view(-1).view(torch.uint8).numpy())

    def write(self, chunk: Chunk, slots: npt.NDArray[np.int64], payload: memoryview) -> None:
        """Put the elements of a chunk into their slots; when it returns, they are there."""
        cache = self._cache(chunk)
        given = torch.frombuffer(payload, dtype=cache.dtype).view(len(slots), chunk.heads[1] - chunk.heads[0], -1)
        with torch.cuda.device_of(cache), torch.cuda.stream(self._stream):
            if self._stream is not None:
                given = given.pin_memory().to(cache.device, non_blocking=True)
            cache[self._where(chunk, slots, cache.device)] = given
            if self._stream is not None:
                self._stream.synchronize()

    def _cache(self, chunk: Chunk) -> torch.Tensor:
        cache = self._caches[chunk.layer]
        return cache if self._order is None else cache.view(*cache.shape[:2], -1)

    def _where(self, chunk: Chunk, slots: npt.NDArray[np.int64], device: torch.device) -> tuple[torch.Tensor, ...]:
        """The index of [token, head, content] in a cache, or of [token, head] where the content lies together.

        In numpy: every operation of torch's gives up the interpreter's lock, which a busy engine does not soon give back.
        """
        block, token = slots // self._block_tokens, slots % self._block_tokens
        head = np.arange(chunk.heads[0] - self._heads[0], chunk.heads[1] - self._heads[0])
        if self._order is None:
            index = block[:, None], head[None, :], token[:, None]
        else:
            index = block[:, None, None], head[None, :, None], self._order[token][:, None, :]
        return tuple(torch.from_numpy(part).to(device) for part in index)


def packed_order(cache: torch.Tensor, isa: str, kv_cache_dtype: str) -> torch.Tensor | None:
    """Where vLLM's CPU kernel for `isa` puts each element of a block of a cache like this; None where it lies in order.

    PlanError where the kernel does not merely reorder (quantised caches).
    """
    if kv_cache_dtype != "auto":
        raise PlanError(f"a KV cache of dtype {kv_cache_dtype} cannot be transferred from or to the CPU; use auto")
    _, heads, tokens, content = cache.shape
    size = tokens * content
    numbers = torch.arange(size)
    found = torch.zeros(size, dtype=torch.int64)
    for digit in range(len(str(size)) // 2 + 1):
        power = _DIGITS**digit
        block = torch.zeros(1, heads, tokens, content, dtype=cache.dtype)
        written = (numbers // power % _DIGITS).view(tokens, 1, content).expand(tokens, heads, content).to(cache.dtype)
        key, value = (half.contiguous() for half in written.chunk(2, dim=2))
        key_cache, value_cache = block.view(1, heads, 2 * tokens, content // 2).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, torch.arange(tokens), isa)
        found += block[0, 0].reshape(-1).to(torch.int64) * power
    if not torch.equal(found.sort().values, numbers):
        raise PlanError(f"the attention kernel {isa} does not keep the elements of a block of {tokens} tokens apart")
    order = torch.empty_like(found)
    order[found] = numbers
    return None if torch.equal(order, numbers) else order.view(tokens, content)
