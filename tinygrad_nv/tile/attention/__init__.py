"""Attention, forward and backward: specs, schedules, legality, and the templates.

  spec.py            softmax(score(q kᵀ)) v, for every head of a batch; backward_spec.py: dq, dk and dv
  band.py            which blocks of keys rows see, which blocks of rows see keys, and which need no mask:
                     in numbers, registers and C; blocks.py: the blocks of a CTA
  schedules.py       how: a type for each template; templates.py: their records, and candidates, best first
  score.py           scores, band and online softmax of a block, on fragments in registers
  backward_score.py  scores and their derivatives on transposed fragments; derivative.py: the derivative as
                     an expression
  dropout.py         which weights are dropped: a counter-based generator, the same for all tiles
  documents.py       documents that lie one after the other and do not see each other
  document_blocks.py which blocks they let a CTA skip; zeros behind the sequences of a ragged batch
  mma/               FlashAttention-2 with mma.sync: sm_80 and later
  wgmma/             FlashAttention-3 with wgmma and TMA: sm_90a
  fma/               float32, without tensor cores
  backward_mma/      the gradient with mma.sync
  backward_wgmma/    the gradient with wgmma and TMA
"""
