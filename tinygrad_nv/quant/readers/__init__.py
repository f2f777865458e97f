"""How files hold quantised matrices: one module for each kind of checkpoint.

  reader.py               what a reader is, and which one a `quantization_config` asks for
  checks.py               what is asked of tensors and settings before any tensor is read
  schemes.py              what numbers are quantised to, as compressed-tensors and ModelOpt write it down
  awq.py                  AutoAWQ's gemm version
  gptq.py                 GPTQ v1 and v2
  compressed_tensors.py   vLLM's: packed integers, int8, fp8, MXFP4, MXFP6, MXFP8, NVFP4, of groups of layers
  fp8.py                  DeepSeek's and Qwen's blocks, fbgemm's rows, ModelOpt's fp8 and NVFP4
  bitsandbytes.py         NF4, FP4 and int8
  torchao.py              int8, fp8 and int4, as transformers stores them
  mxfp4.py                gpt-oss's experts
  gguf.py                 llama.cpp's blocks
  online.py               floats, quantised as they are read
"""
