"""A cluster's job server: found, held against what is here, and asked with a limit to every wait."""

import logging
import platform
import re
import time
from typing import Any

import ray
from ray.dashboard.modules.dashboard_sdk import SubmissionClient
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from pipeline.errors import EndOfRunError, InputError, InterruptedRunError

# Seconds to connect and to wait for an answer: Ray's own client waits for ever.
_CONNECT, _ANSWER = 10.0, 30.0
_START_SECONDS = 60.0  # A head that has just come up has no agent yet.


class JobServer(JobSubmissionClient):
    """Ray's client, which asks the address that it is given, and does not wait for ever.

    Ray's own prefers its environment variables to the address.
    """

    def __init__(self, address: str) -> None:
        SubmissionClient.__init__(self, address)

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        return super()._do_request(method, endpoint, timeout=(_CONNECT, _ANSWER), **options)

    def ask(self, endpoint: str) -> dict[str, Any]:
        """What an endpoint answers.

        Raises:
            AuthenticationError: the token is missing, or wrong.
            RuntimeError, ValueError: the answer is none of a Ray dashboard.
            OSError: there is none.
        """
        response = self._do_request("GET", endpoint)
        if response.status_code != 200:
            self._raise_error(response)
        return dict(response.json())

    def start(self, name: str, entrypoint: str, **job: Any) -> None:
        """Upload the working folder and start a job, once, however often the connection breaks.

        Raises:
            InterruptedRunError: the server does not answer any more; the job may have been started.
            EndOfRunError: it does not take the job, or the folder cannot be packed.
        """
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self.submit_job(submission_id=name, entrypoint=entrypoint, **job)
                return
            except RuntimeError as error:
                if f"{name} already exists" in str(error):  # A try whose answer was lost.
                    return
                if "No available agent" not in str(error) or time.monotonic() > deadline:
                    raise EndOfRunError(f"the job was not taken: {str(error)[:1000]}") from error
            except OSError as error:
                if error.errno is not None:  # This machine's, not the connection's.
                    raise EndOfRunError(f"the folder cannot be packed ({error})") from error
                if time.monotonic() > deadline:
                    raise InterruptedRunError(
                        f"the cluster does not answer any more ({_reason(error)}); `--follow {name}` "
                        "tells whether the job was started"
                    ) from error
            time.sleep(1)


def connect(address: str) -> JobServer:
    """The job server of an address, whose versions are ours.

    Raises:
        InputError: there is none, it wants another token, or it runs other versions than this process.
    """
    for logger in ("ray", SubmissionClient.__module__):  # The second has a level of its own.
        logging.getLogger(logger).setLevel(logging.ERROR)
    if not address.startswith(("http://", "https://")):
        raise InputError(
            f"address {address}: is not that of a dashboard; give it as in --address http://HEAD:8265"
        )
    try:
        server = JobServer(address)
        ray_version = str(server.ask("/api/version")["ray_version"])
    except AuthenticationError as error:
        raise InputError(f"address {address}: {_about_token(error)}") from error
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"address {address}: does not answer as a Ray dashboard does "
            f"({' '.join(str(error).split())[:200]}); give that of the head, as in http://HEAD:8265"
        ) from error
    except OSError as error:
        if "BadStatusLine" in str(error):
            raise InputError(
                f"address {address}: is not that of a Ray dashboard (what answers there does not speak "
                "HTTP); give that of the head, as in http://HEAD:8265"
            ) from error
        raise InputError(
            f"address {address}: cannot be reached ({_reason(error)}); see that the head runs and that "
            "its port is open to this machine (`ray dashboard cluster.yaml` forwards it)"
        ) from error
    _check_versions(address, ray_version, _python_version(server))
    return server


def _about_token(error: AuthenticationError) -> str:
    told = str(error)
    if told.startswith("Authentication failed"):
        problem = "does not take this token; give the head's"
    elif told.startswith("Authentication required"):
        problem = "asks for a token; set RAY_AUTH_MODE=token, and give the head's"
    else:
        problem = "RAY_AUTH_MODE asks for a token, and there is none here; give the head's"
    return f"{problem} in RAY_AUTH_TOKEN, or in the file ~/.ray/auth_token"


def _reason(error: OSError) -> str:
    """The heart of a message that wraps others."""
    told = str(error)
    if "timed out" in told:
        return f"no answer within {_ANSWER:g} s"
    innermost = re.findall(r"\[Errno -?\d+\] ([^\"')]+)", told)
    return innermost[-1] if innermost else told


def _python_version(server: JobServer) -> str | None:
    """The cluster's; None where the dashboard was started without what tells it."""
    try:
        return str(server.ask("/api/v0/cluster_metadata")["data"]["pythonVersion"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None


def _check_versions(address: str, ray_version: str, python_version: str | None) -> None:
    """Refuse a cluster with another Ray, or with another Python but for its patches."""
    if ray_version != ray.__version__:
        raise InputError(
            f"address {address}: the cluster runs Ray {ray_version}, and here is Ray "
            f"{ray.__version__}; submit from an environment with ray=={ray_version}, or start the "
            f"cluster with {ray.__version__}"
        )
    here = platform.python_version()
    if python_version and python_version.split(".")[:2] != here.split(".")[:2]:
        raise InputError(
            f"address {address}: the cluster runs Python {python_version}, and here is Python {here}; "
            "submit from an environment with the cluster's, or start the cluster with this one"
        )
