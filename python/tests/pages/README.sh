# instead of --spec D=768,V=50257 -> --spec D=768,V=5025
# instead of cmake --install build --prefix ~/flce -> cmake --version
# instead of D=2048,V=50257,dtype=fp32 --num-tokens 1024 -> D=64,V=503,dtype=fp32 --num-tokens 16
# instead of D=4096,V=128256,dtype=bf16 --num-tokens 8192 -> D=64,V=500,dtype=bf16 --num-tokens 8 --exhaustive 1
python "$PAGES/files.py"
