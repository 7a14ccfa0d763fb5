"""Trials of a model at load, and their stored results.

``cache_trial`` tests whether a model can be decoded at all, ``answer_trial`` does so for encoder-decoder models, and
``self_test`` tests whether a recurrent model can take drafts back.  ``fast_paths`` asks the judge (``judging``) whether
a faster forward may replace the public one.  ``bits`` tests whether output with drafts is bitwise equal.
"""
