"""Every number that decides what the times of requests, events and log lines show: the table of `docs/reference/thresholds.md`.

A docstring says which statistic the number is compared with, by its symbol in `docs/explanation/request-sums.md` where it has one,
and how the number was found: *Measured* on recordings, *Given* by how servers work or by arithmetic, or *Chosen*, where numbers nearby
do as well or nobody has measured others. "Complete" recordings have a span of every request; from "thinned" ones 30 % were removed. The
measured ranges of T, K, C, M, L, F, U, N and S are those of `python tests/benchmarks/evidence.py RUN...`, over 24 generated servers and ten
recordings of real ones (`fixtures/runs`, `fixtures/logged`, and a day of one server), unless a text says otherwise.
"""

# -- samples ----------------------------------------------------------------------------------------------

LEAST_SAMPLES = 20
"""Fewest requests, steps or trace ids that a share, a median or a spread is computed from. Chosen: a share of 20 has an error of 0.1."""

LEAST_PLAIN_INTERVALS = 50
"""Fewest plain intervals that skew is computed from. Chosen: their outer tenths then have five each."""

LEAST_FULL_STEPS = 500
"""Fewest steps with a full cache that unevenness is computed from. Chosen: fewer cover only one or two preempted requests."""

LEAST_QUEUE_STEPS = 100
"""Fewest plain steps with a queue that fullness is computed from. Chosen: fewer cover only one or two batches."""

LEAST_LINES = 8
"""Fewest intervals between log lines that the engine's work between two waits is fitted to. Chosen: two for each of its four parts."""

LEAST_OFFSET_STEPS = 5
"""Fewest steps with a summary and an event that the event's offset is measured from. Chosen: their median has a spread then."""

# -- which stamps are of one step -------------------------------------------------------------------------

SAME_STAMP_NS = 1_500
"""Largest distance of two stamps of one step. Given: seconds as floats are rounded to 240 ns; other steps are a step time away."""

SAME_CLIENT_STAMP_SHARE = 1 / 3
"""The same for a client, as a share of a short step. Chosen: it receives the tokens of a step one after the other."""

NEAR_SHARE = 0.25
"""Largest distance of a time from the end of its step, as a share of a short step. Chosen: half of what separates it from a middle."""

CLEAR_MULTIPLE = 2.4
"""From this many `NEAR_SHARE` on, a time is at the end of no step; between the two it is ambiguous. Chosen: 0.6 of a short step."""

# -- whether tokens count the steps (K, T) ----------------------------------------------------------------

MOST_CONTRADICTING = 0.1
"""K, the largest share of contradicting requests. Measured: 0.02 in runs with one token a step, above 0.3 with speculative decoding."""

FAR_STEPS = 1.0
"""A request contradicts the others if its steps are off by more than this. Given: counts are whole."""

FAR_SHARE = 0.03
"""And by more than this share of its steps. Measured: without idle gaps the estimate itself is off by 2 % in long requests."""

USUAL_CONTRADICTING = 0.02
"""K up to which no request is left out. Measured: at most that in runs with one token a step."""

LATE_SHARE = 0.01
"""A preempted request is late by more than this share of its steps, and by `FAR_STEPS`. Given: a preemption costs a whole prompt."""

QUICK_QUANTILE = 0.2
"""Quantile of the times per token at which a request was not preempted. Chosen: where more were, too few remain."""

LEAST_NOT_PREEMPTED = 0.5
"""Least share of requests that were not preempted. Chosen: the count of the steps is theirs."""

MOST_LACKING = 0.02
"""T, the largest share of requests whose times contradict each other, or that lack times or lengths. Chosen: their batches are off by as much."""

SAME_DURATION = 0.1
"""M: how near to the usual time a decode takes about the usual time, as a share of it. Chosen: less than steps of other batches differ."""

MOST_MISCOUNTED = 0.005
"""M, the largest share of requests with the usual time and less than half of the usual tokens. Measured: 0 where a client has the engine's counts."""

# -- whether all requests are there (r, C, L, F, U) -------------------------------------------------------

SURPRISE = 14.0
"""r: a sampler's mark is one that chance makes in one of e^14 recordings. Given: one in a million."""

LEAST_SAMPLER_RATE = 1e-4
"""r, the least rate of a sampler. Chosen: ids that are all smaller come from a counter."""

CLOSE_SHARE = 0.2
"""C: two stamps nearer than this share of a short step are close. Given: no step of an engine is so much shorter than its short ones."""

MOST_CLOSE = 0.3
"""C, the most close stamps, as a share of those that independent engines would have. Measured: 0 to 0.1 for one engine, about 1 for two."""

FEW_CLOSE = 3
"""C: so many close stamps are not evidence. Chosen."""

LATE_STEPS = 0.4
"""L: a request waits for a step in progress if it waits longer than this share of a short step. Given: half a step is the mean such wait."""

LATE_CHANCE = 0.05
"""L: there are too many such waits if chance gives as many with a lower probability. Chosen: the usual level of a test."""

FEW_LATE = 0.02
"""L, the usual share of such waits without jitter. Measured with the next three: 0 to 0.12 in complete recordings of real servers, 0.21 with steps of 4 ms; 0.19 to 0.35 in thinned ones."""

LATE_PER_QUARTILE = 3.0
"""L: how much a jitter of the front end adds to it, per lower quartile of all waits in steps. Measured as `FEW_LATE`."""

MOST_LATE = 0.15
"""L, the largest usual share. Measured as `FEW_LATE`."""

MOST_LATE_SHORT = 0.2
"""The same where steps are shorter than `SHORT_STEP_US`. Measured as `FEW_LATE`."""

SHORT_STEP_US = 10_000.0
"""Time of a short step below which a front end's jitter is as long as a step. Measured as `FEW_LATE`."""

JITTER_US = 1_500.0
"""L: how late a front end on a busy machine may be. Measured: five complete recordings with steps of 1.8 ms."""

JITTER_STEPS = 1.5
"""L: a wait for a step in progress ends before so many steps; jitter does not. Given."""

JITTER_TAIL = 0.2
"""L: share of the late requests that are later than that, from which on it is jitter. Measured: 0.19 to 0.9 in those five, at most 0.19 in nine generated sampled runs."""

MOST_SLOWDOWN = 3.0
"""L says nothing if the mean step is so many times a short one. Chosen: what delays the engine delays arrivals too."""

QUEUE_STEPS = 5.0
"""F: a request that waits for more steps waits in a queue. Given: a step in progress and the order of arrivals take less."""

ABOUT_MOST = 0.95
"""F: so many of the most requests are about as many. Given: a request that ends is replaced a step later."""

LEAST_FULL = 0.5
"""F, the least share of the steps with a queue in which about the most requests run. Measured: 1 in complete recordings, 0.1 to 0.2 in thinned ones."""

MOST_UNEVENNESS = 0.2
"""U, the largest unevenness of a full cache. Measured: 0.08 to 0.18 in generated runs, 0.13 in a real one; 0.24 to 0.7 where three to five of ten are missing."""

# -- what step times show (N, S) --------------------------------------------------------------------------

FEW_STEPS = 4
"""N is that of intervals of up to so many steps. Chosen: longer ones average out what several tokens a step do."""

MOST_NOISE = 0.45
"""N, the largest. Measured: 0.08 to 0.27 in complete recordings, 0.35 with steps of 4 ms on a busy machine; 0.55 or more where 5 % of the tokens come in pairs."""

MOST_SKEW = 1.5
"""S, the largest skew. Measured: 0.65 to 1.3 in complete recordings, 2.6 with steps of 4 ms, whose noise is above `NOISY`; 1.5 to 4.6 in thinned ones, 1.3 to 13 in generated ones."""

NOISY = 0.48
"""S says nothing above this noise of a step. Measured: a machine with other work stalls now and then."""

LEAST_PROMPT_SHARE = 0.2
"""S says nothing if long intervals are longer by less than this share of a prompt. Chosen: it is a prompt that they would have."""

LONG_STEPS = 16
"""Noise that the steps of an interval share is that of intervals of more steps. Given: the noise of single steps averages out."""

LEAST_NOISE = 1e-4
"""Least noise of a step, as a share of its time. Given: a simulator's steps have none, and stamps are whole microseconds."""

# -- prompts in the prefix cache (O, D) -------------------------------------------------------------------

ODD_SD = 3.0
"""O: a prompt's time is odd from this many standard deviations on. Chosen: one in 370 is by chance."""

USUAL_ODD = 0.005
"""O, the share of odd times without a reason. Measured: 0 to 0.004 without a prefix cache, beside the share among steps without a prompt."""

SURE_SHARE_SD = 4.0
"""O: so many standard errors make a larger share sure. Chosen: one recording in 30,000 by chance."""

SURE_FALL_SD = 5.0
"""D: so many standard errors make it sure that longer prompts take less time. Chosen: twelve groups are compared."""

LENGTH_GROUPS = 12
"""D: groups of prompts by length. Chosen."""

# -- numbers of nodes -------------------------------------------------------------------------------------

SURE_WHOLE_SD = 1.3
"""Clusters of nodes join where every other whole number of steps is further off than so many standard deviations. Chosen: one in five is left open."""

SPEED_US = 10e6
"""The machine has one speed for this long. Measured: shared machines change theirs within half a minute."""

QUIET_REQUESTS = 7.0
"""Requests that the mean rate predicts for a time without any: the engine had become empty. Given: a chance of e^-7."""

# -- preemptions ------------------------------------------------------------------------------------------

LEAST_LOST_STEPS = 1.0
"""A request was preempted if more steps than this gave it no token. Given: counts are whole."""

LEAST_LOST_SHARE = 0.01
"""And more than this share of its tokens. Measured: counts of long requests are off by less."""

# -- events and summaries ---------------------------------------------------------------------------------

EVENT_SD_US = 200.0
"""Standard deviation of an event's offset that no step measures. Measured: SCHEDULED comes 0.1 to 0.7 ms after its step's start."""

LEAST_EVENT_SD_US = 10.0
"""Least standard deviation of a start that follows from an event. Chosen: it is never as sure as that of a summary."""

STAMP_SD_US = 100.0
"""Error of a step's end that follows from the stamps of requests. Measured on two machines."""

DISAGREEING_SD = 4.0
"""Two estimates of one start disagree from this many of their standard deviations on. Chosen: one in 16,000 by chance."""

DISAGREEING_NS = 1_000_000
"""And from this distance on. Measured: SCHEDULED comes up to 0.7 ms after its step's start, updates within 0.5 ms of its end."""

# -- lines of a log ---------------------------------------------------------------------------------------

MOST_WORK_DIFFERENCE = 0.05
"""Largest median difference of waits and work from the clock, as a share of it, at which they are step times. Chosen: errors of the model are as large."""

LEAST_WAIT_SHARE = 0.5
"""Least share of the waits in the time. Given: below it most of a step is not what the line prints."""

CLEARLY_BETTER = 0.8
"""Work in proportion to the waits counts if it leaves less than this share of the deviations of the other form. Chosen."""

PAUSE_SD = 4.0
"""A step of only new requests comes after a pause if its time exceeds the wait by so many standard deviations more than usual. Chosen."""

HALF_HOUR_US = 1800e6
"""Changes of a time zone, or of daylight saving, are whole half hours. Given."""

NEAR_HALF_HOUR_US = 2e6
"""How near to whole half hours a gap looks like one. Given: one in 450 true pauses of that length does."""

JUMP_RATIO = 20.0
"""A time between two stamps that no pause explains is a jump of the clock if it is so many times the usual. Measured: compilation and stalls stay below."""

LEAST_JUMP_US = 2e6
"""And longer than the usual by this. Chosen: coarse stamps are whole seconds."""

LEAST_OUTPUT_STEPS = 0.5
"""Least share of the steps with output tokens in a run whose requests have several. Given: each request has one prompt step."""

# -- spans beside a log -----------------------------------------------------------------------------------

ZONE_S = 900
"""Time zones differ by whole quarters of an hour. Given."""

PRINTED_S = 0.5
"""Longest time from the end of a step until its line is printed. Measured: below 0.1 s but while a server compiles."""

LEAST_EXPLAINED = 0.3
"""Least share of the prompts that equal the prompt tokens of a line. Measured: prefix-cache hits and chunks leave 0.4 or more."""

LEAST_AGREEMENT = 0.5
"""Least share of the steps on which log and requests agree, if the two are of one server. Measured: below 0.2 for another server."""

NEAR_LINE_S = 0.05
"""Standard deviation of an event's offset that no step measures. Measured: SCHEDULED comes 0.1 to 0.7 ms after its step's start."""
