"""Retrievers and re-rankers for LangChain and LlamaIndex that search an index. The
module `langchain` needs the extra `langchain`, and the module `llama_index` needs the
extra `llama-index`.
"""
