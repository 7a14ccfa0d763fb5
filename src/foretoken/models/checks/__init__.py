"""What is tried on a model when it is loaded, and what is remembered of it.

``cache_trial`` asks whether it can be decoded at all, ``answer_trial`` the same of an encoder-decoder model, and
``self_test`` whether drafts for a recurrent one can be taken back.  ``fast_paths`` asks the judge (``judging``) whether
a faster forward may take the place of the public one, and ``bits`` whether text with drafts is equal to the last bit.
"""
