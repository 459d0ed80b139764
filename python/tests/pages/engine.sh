python "$PAGES/qwen3.py"
