"""Read and compare the logs of other tools: torch's DebugMode and torchtitan's numerics debugger.

No trace is made of them: a trace has exact fingerprints, leaves with names and values with their history,
and a log has none of these. `diff_logs` compares what there is, and says what is missing.
"""

from opdrift.foreign.answer import diff_logs
from opdrift.foreign.opening import read_log

__all__ = ["diff_logs", "read_log"]
