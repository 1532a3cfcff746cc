"""Every number that decides what the times of requests, events and log lines show: the table of
`docs/reference/thresholds.md`.

A docstring says which statistic the number is compared with, by its symbol in `docs/explanation/request-sums.md` where
it has one, and how the number was found: *Measured* on recordings, *Given* by how servers work or by arithmetic, or
*Chosen*, where numbers nearby do as well or nobody has measured others. "Complete" recordings have a span of every
request; from "thinned" ones 30 % were removed. The measured ranges of T, K, C, M, L, F, U, N and S are those of `python
tests/benchmarks/evidence.py RUN...`, over 24 generated servers and ten recordings of real ones (`fixtures/runs`,
`fixtures/logged`, and a day of one server), unless a text says otherwise.
"""

# -- samples ----------------------------------------------------------------------------------------------

LEAST_SAMPLES = 20
"""Fewest requests, steps or trace ids that a share, a median or a spread is computed from. Chosen: a share of 20 has an
error of 0.1."""

LEAST_PLAIN_INTERVALS = 50
"""Fewest plain intervals that skew is computed from. Chosen: their outer tenths then have five each."""

LEAST_FULL_STEPS = 500
"""Fewest steps with a full cache that unevenness is computed from. Chosen: fewer cover only one or two preempted
requests."""

LEAST_QUEUE_STEPS = 100
"""Fewest plain steps with a queue that fullness is computed from. Chosen: fewer cover only one or two batches."""

LEAST_LINES = 8
"""Fewest intervals between log lines that the engine's work between two waits is fitted to. Chosen: two for each of its
four parts."""

LEAST_OFFSET_STEPS = 5
"""Fewest steps with a summary and an event that the event's offset is measured from. Chosen: their median has a spread
then."""

# -- which stamps are of one step -------------------------------------------------------------------------

SAME_STAMP_NS = 1_500
"""Largest distance of two stamps of one step. Given: seconds as floats are rounded to 240 ns; other steps are a step
time away."""

SAME_CLIENT_STAMP_SHARE = 1 / 3
"""The same for a client, as a share of a short step. Chosen: it receives the tokens of a step one after the other."""

NEAR_SHARE = 0.25
"""Largest distance of a time from the end of its step, as a share of a short step. Chosen: half of the way to where two
steps are as near."""

CLEAR_MULTIPLE = 2.4
"""From this many `NEAR_SHARE` on, a time is at the end of no step; between the two it is ambiguous. Chosen: 0.6 of a
short step."""

# -- whether tokens count the steps (K, T) ----------------------------------------------------------------

MOST_CONTRADICTING = 0.1
"""K, the largest share of contradicting requests. Measured: 0 to 0.001 in complete recordings; 0 to 0.28 with 5 % of
the tokens in pairs, 0.06 to 0.16 with 10 % of the lengths from the text, up to 0.64 for two engines as one."""

FAR_STEPS = 1.0
"""A request contradicts the others if its steps are off by more than this. Given: counts are whole."""

FAR_SHARE = 0.03
"""And by more than this share of its steps. Chosen: where requests of minutes overlap, the fit of the steps itself is
up to 2 % off."""

USUAL_CONTRADICTING = 0.02
"""K up to which no request is left out. Measured: at most 0.001 in runs with one token a step."""

LATE_SHARE = 0.01
"""A preempted request is late by more than this share of its steps, and by `FAR_STEPS`. Chosen."""

QUICK_QUANTILE = 0.2
"""Quantile of the times per token at which a request was not preempted. Chosen: where more than four of five were, no
request counts."""

LEAST_NOT_PREEMPTED = 0.5
"""Least share of requests that were not preempted. Chosen: the count of the steps is theirs."""

MOST_LACKING = 0.02
"""T, the largest share of requests whose times contradict each other, or that lack times or lengths. Chosen: T is 0 in
all those recordings; batches are off by as much as requests lack."""

SAME_DURATION = 0.1
"""M: how near to the usual time a decode takes about the usual time, as a share of it. Chosen."""

MOST_MISCOUNTED = 0.005
"""M, the largest share, of a client's requests. Measured: 0 in complete generated recordings, 0.008 (median) with 10 %
of the lengths from the text; the spans of real servers, which are not asked, have up to 0.009."""

# -- whether all requests are there (r, C, L, F, U) -------------------------------------------------------

SURPRISE = 14.0
"""r: a sampler's mark is one that chance makes in one of e^14 recordings. Given: one in a million."""

LEAST_SAMPLER_RATE = 1e-4
"""r, the least rate of a sampler. Chosen: ids that are all smaller come from a counter."""

CLOSE_SHARE = 0.2
"""C: two stamps nearer than this share of a short step are close. Chosen: no step of an engine is so much shorter than
its short ones."""

MOST_CLOSE = 0.3
"""C, the most close stamps, as a share of those that independent engines would have. Measured: 0 to 0.03 in complete
and thinned recordings; 0.5 (median) to 0.7 for two engines as one, if both are busy."""

FEW_CLOSE = 3
"""C: so many close stamps are not evidence. Chosen."""

LATE_STEPS = 0.4
"""L: a request waits for a step in progress if it waits longer than this share of a short step. Chosen: the mean such
wait is half a step."""

LATE_CHANCE = 0.05
"""L: there are too many such waits if chance gives as many with a lower probability. Chosen: the usual level of a
test."""

FEW_LATE = 0.02
"""L, the usual share of such waits without jitter. Measured: in complete recordings 0 if generated, 0 to 0.21 if real
(0.04 at the median); in thinned ones up to 0.19 and 0.38 (0.23 at the median). The next four make up for jitter."""

LATE_PER_QUARTILE = 3.0
"""L: how much a jitter of the front end adds to it, per lower quartile of all waits in steps. Measured as
`FEW_LATE`."""

MOST_LATE = 0.15
"""L, the largest usual share. Measured as `FEW_LATE`."""

MOST_LATE_SHORT = 0.2
"""The same where steps are shorter than `SHORT_STEP_US`. Measured as `FEW_LATE`."""

SHORT_STEP_US = 10_000.0
"""Time of a short step below which a front end's jitter is as long as a step. Measured as `FEW_LATE`."""

JITTER_US = 1_500.0
"""L: how late a front end on a busy machine may be. Measured: five complete recordings with steps of 1.8 ms."""

JITTER_STEPS = 1.5
"""L: a wait for a step in progress ends before so many steps; jitter does not. Given: such a wait takes one step at
most, and half a step is its own error."""

JITTER_TAIL = 0.2
"""L: share of the late requests that are later than that, from which on it is jitter. Measured: 0.19 to 0.9 in five
complete recordings with steps of 1.8 ms, at most 0.19 in nine generated sampled runs."""

MOST_SLOWDOWN = 3.0
"""L says nothing if the mean step is so many times a short one. Chosen: what delays the engine delays arrivals too."""

QUEUE_STEPS = 5.0
"""F: a request that waits for more steps waits in a queue. Chosen: a step in progress and the order of arrivals take
less."""

ABOUT_MOST = 0.95
"""F: so many of the most requests are about as many. Chosen: a request that ends is replaced a step later."""

LEAST_FULL = 0.5
"""F, the least share of the steps with a queue in which about the most requests run. Measured: 1 in complete
recordings, 0.04 to 0.38 in thinned generated ones, 0.5 in a real one."""

MOST_UNEVENNESS = 0.2
"""U, the largest of a full cache. Measured: 0.14 to 0.2 in complete generated recordings, 0.26 to 0.42 in thinned ones;
0.13 in a real one that preempts, 0.47 in one whose requests fill the slots and not the cache."""

# -- what step times show (N, S) --------------------------------------------------------------------------

FEW_STEPS = 4
"""N is that of intervals of up to so many steps. Chosen: longer ones average out what several tokens a step do."""

MOST_NOISE = 0.45
"""N, the largest. Measured: 0.02 to 0.04 in complete generated recordings, 0.08 to 0.35 in real ones (the last with
steps of 4 ms on a busy machine); up to 2.8 for two engines as one."""

MOST_SKEW = 1.5
"""S, the largest skew. Measured: 0.9 to 1.6 in complete generated recordings and 0.9 to 1.4 in real ones, 2.6 in one
whose noise is above `NOISY`; 1.4 to 3.8 in thinned real ones, 1.5 to 24 in generated ones."""

NOISY = 0.48
"""S says nothing above this noise of a step. Measured: 0.03 to 0.07 in complete generated recordings, 0.11 to 0.52 in
real ones; above it S of complete recordings is above `MOST_SKEW`."""

LEAST_PROMPT_SHARE = 0.2
"""S says nothing if long intervals are longer by less than this share of a prompt. Chosen: it is a prompt that they
would have."""

LONG_STEPS = 16
"""Noise that the steps of an interval share is that of intervals of more steps. Chosen: the noise of single steps
averages out."""

LEAST_NOISE = 1e-4
"""Least noise of a step, as a share of its time. Given: a simulator's steps have none, and stamps are whole
microseconds."""

# -- prompts in the prefix cache (O, D) -------------------------------------------------------------------

ODD_SD = 3.0
"""O: a prompt's time is odd from this many standard deviations on. Chosen: one in 370 is by chance."""

USUAL_ODD = 0.005
"""O, the share of odd times without a reason, beside the share among steps without a prompt. Chosen: 0.003 are odd by
chance."""

SURE_SHARE_SD = 4.0
"""O: so many standard errors make a larger share sure. Chosen: one recording in 30,000 by chance."""

SURE_FALL_SD = 5.0
"""D: so many standard errors make it sure that longer prompts take less time. Chosen: twelve groups are compared."""

LENGTH_GROUPS = 12
"""D: groups of prompts by length. Chosen."""

# -- numbers of nodes -------------------------------------------------------------------------------------

SURE_WHOLE_SD = 1.3
"""Clusters of nodes join where every other whole number of steps is further off than so many standard deviations.
Chosen: one in five is not joined by its own intervals."""

SPEED_US = 10e6
"""The machine has one speed for this long, and the batches explain the times around it. Chosen."""

QUIET_REQUESTS = 7.0
"""Requests that the mean rate predicts for a time without any: the engine had become empty. Given: a chance of e^-7."""

# -- preemptions ------------------------------------------------------------------------------------------

LEAST_LOST_STEPS = 1.0
"""A request was preempted if more steps than this gave it no token. Given: counts are whole."""

LEAST_LOST_SHARE = 0.01
"""And more than this share of its tokens. Chosen: counts of long requests are off by less."""

# -- events and summaries ---------------------------------------------------------------------------------

EVENT_SD_US = 200.0
"""Standard deviation of an event's offset that no step measures. Measured: SCHEDULED comes 0.1 to 0.7 ms after its
step's start."""

LEAST_EVENT_SD_US = 10.0
"""Least standard deviation of a start that follows from an event. Chosen: it is never as sure as that of a summary."""

STAMP_SD_US = 100.0
"""Error of a step's end that follows from the stamps of requests. Measured on two machines."""

DISAGREEING_SD = 4.0
"""Two estimates of one start disagree from this many of their standard deviations on. Chosen: one in 16,000 by
chance."""

DISAGREEING_NS = 1_000_000
"""And from this distance on. Measured: SCHEDULED comes up to 0.7 ms after its step's start, updates within 0.5 ms of
its end."""

# -- lines of a log ---------------------------------------------------------------------------------------

MOST_WORK_DIFFERENCE = 0.05
"""Largest median difference of waits and work from the clock, as a share of it, at which they are step times.
Chosen."""

LEAST_WAIT_SHARE = 0.5
"""Least share of the waits in the time. Chosen: below it most of a step is not what the line prints."""

CLEARLY_BETTER = 0.8
"""Work in proportion to the waits counts if it leaves less than this share of the deviations of the other form.
Chosen."""

PAUSE_SD = 4.0
"""A step of only new requests comes after a pause if its time exceeds the wait by so many standard deviations more than
usual. Chosen."""

HALF_HOUR_US = 1800e6
"""Changes of a time zone, or of daylight saving, are whole half hours. Given."""

NEAR_HALF_HOUR_US = 2e6
"""How near to whole half hours a gap looks like one. Given: one in 450 true pauses of that length does."""

JUMP_RATIO = 20.0
"""A time between two stamps that no pause explains is a jump of the clock if it is so many times the usual: of the
larger of the median step time, and the median ratio of time to printed waits. Chosen."""

LEAST_JUMP_US = 2e6
"""And longer than the usual by this. Chosen: coarse stamps are whole seconds."""

LEAST_OUTPUT_STEPS = 0.5
"""Least share of the steps with output tokens in a run whose requests have several. Given: each request has one prompt
step."""

# -- spans beside a log -----------------------------------------------------------------------------------

ZONE_S = 900
"""Time zones differ by whole quarters of an hour. Given."""

PRINTED_S = 0.5
"""Longest time from the end of a step until its line is printed. Chosen."""

LEAST_EXPLAINED = 0.3
"""Least share of the prompts that equal the prompt tokens of a line. Chosen: prefix-cache hits and chunks make it
smaller."""

LEAST_AGREEMENT = 0.5
"""Least share of the steps on which log and requests agree, if the two are of one server. Chosen."""

NEAR_LINE_S = 0.05
"""Largest distance of a fine stamp from the end of its step. Chosen."""
