"""Stock vLLM's CPU worker on a slower device: a stage's time passes once its input is there, as computing would."""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.parallel_state import get_pp_group

from coral_core.engine.plugin.cpu_worker import StageWorker


class SlowWorker(StageWorker):
    """`CORAL_STAGE_DELAY_MS` as for StageWorker, which sleeps while its input is still on the way."""

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        delay_s, self._delay_s = self._delay_s, 0.0
        execute = self.model_runner.execute_model

        def after_delay(output: Any, inputs: Any = None) -> Any:
            if output.total_num_scheduled_tokens:
                if not get_pp_group().is_first_rank:
                    inputs.wait_for_comm()
                time.sleep(delay_s)
            return execute(output, inputs)

        self.model_runner.execute_model = after_delay
        return times
