"""Images in prompts: what reads them, and what of them enters a step.

  images.py   Images of arrays, PIL's, bytes and URLs, as RGB bytes
  parts.py    Messages with parts that are images
  encoder.py  `VisionEncoder`: images to rows of the embedding, by captured steps
  prompt.py   `PromptImages`: a prompt's rows and positions, and placeholders that become tokens
"""
