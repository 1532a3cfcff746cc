"""Files of any known shape to byte frames, each with its file and offset."""

from tracefit.sources.frames import STDIN, read_frames
from tracefit.sources.limits import MAX_EXPANSION, MAX_RECORD_BYTES
from tracefit.sources.records import Encoding, Frame, Reject

__all__ = ["MAX_EXPANSION", "MAX_RECORD_BYTES", "STDIN", "Encoding", "Frame", "Reject", "read_frames"]
