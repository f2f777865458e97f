"""Attention, forward and backward: specs, schedules, legality, and the templates.

  backward_defaults.py  Schedules of attention's backward pass, by architecture, the better known ones …
  backward_score.py     Scores and their derivatives in a backward pass, on transposed fragments: keys …
  backward_spec.py      What the backward pass of an attention computes: dq, dk and dv from the gradient of …
  defaults.py           Schedules of attention, by architecture, the better known ones before the others
  derivative.py         The derivative of a score by its sum, as an expression
  dropout.py            Which probabilities of an attention are dropped: a counter-based generator, the …
  ragged_rest.py        Rows of a ragged batch's result that belong to no sequence, since they come after …
  score.py              Scores, band and softmax of a block of attention, on fragments in registers
  spec.py               What an attention computes: softmax(score(q kᵀ)) v, for every head of a batch
  backward_mma/         The gradient of attention with mma.sync (FlashAttention-2)
  backward_wgmma/       The gradient of attention with wgmma and TMA (FlashAttention-3)
  fma/                  Attention in float32, without tensor cores
  mma/                  Attention with mma.sync (FlashAttention-2): sm_80 and later
  wgmma/                Attention with wgmma and TMA (FlashAttention-3): sm_90a
"""
