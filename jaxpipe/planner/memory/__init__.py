"""The memory of a device during a step, by kind, by arithmetic."""

from ._experts import expert_chunks as expert_chunks
from ._peak import PeakMemory as PeakMemory
from ._peak import memory as memory
from ._peak import visit_bytes as visit_bytes
from ._peak import wgrad_bytes as wgrad_bytes
