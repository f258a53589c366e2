"""The table of services; a new one is a module with a SERVICE and a row here and in `registry`."""

from search_r1.online import brave, google, serpapi, serper, tavily

SERVICES = {
    module.SERVICE.name: module.SERVICE for module in (google, serpapi, brave, serper, tavily)
}
"""By --retriever_name."""
