"""The file with which a scheduler of a cluster runs `jaxpipe train` on many hosts."""

from ._cluster_job import ClusterJob as ClusterJob
from ._cluster_job import cluster_job as cluster_job
from ._jobset import jobset_file as jobset_file
from ._slurm import slurm_file as slurm_file
from ._xpk import xpk_file as xpk_file
