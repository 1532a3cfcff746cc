"""Files of any known shape to byte frames, each with its file and offset."""

from tracefit.sources.files import TraceFile
from tracefit.sources.frames import STDIN, read_frames
from tracefit.sources.limits import MAX_EXPANSION, MAX_RECORD_BYTES
from tracefit.sources.records import Encoding, Frame, Reject
from tracefit.sources.runs import Inputs, LeftOut, RunSource, open_inputs
from tracefit.sources.sniff import Contents, sniff

__all__ = [
    "MAX_EXPANSION",
    "MAX_RECORD_BYTES",
    "STDIN",
    "Contents",
    "Encoding",
    "Frame",
    "Inputs",
    "LeftOut",
    "Reject",
    "RunSource",
    "TraceFile",
    "open_inputs",
    "read_frames",
    "sniff",
]
