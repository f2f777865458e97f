"""How files hold quantised matrices: one module for each kind of checkpoint.

  reader.py               what a reader is, and which one a `quantization_config` asks for
  awq.py                  AutoAWQ's gemm version
  gptq.py                 GPTQ v1 and v2
  compressed_tensors.py   vLLM's: packed integers, int8, fp8, MXFP4, NVFP4, of groups of layers
  fp8.py                  DeepSeek's and Qwen's blocks, fbgemm's rows, ModelOpt's tensors
  bitsandbytes.py         NF4 and int8
  mxfp4.py                gpt-oss's experts
  gguf.py                 llama.cpp's blocks
"""
