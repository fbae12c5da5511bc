"""Two tools through LangGraph's ReAct agent on langchain-openai."""

import sys

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


agent = create_react_agent(ChatOpenAI(model="policy"), [add], prompt="Use the tool.")
print(agent.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].content)
