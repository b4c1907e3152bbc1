"""Retrievers and re-rankers for LangChain and LlamaIndex that search an index. The
module of each library needs the extra of its name, `langchain` or `llama-index`.
"""
