variable "name" {
  description = "Prefix of all names."
  type        = string
  default     = "coral"
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,19}$", var.name))
    error_message = "Use 2 to 20 lowercase letters, digits and dashes."
  }
}

variable "fleets" {
  description = "Names of the fleets that the flow role may act for (the tag coral:fleet)."
  type        = list(string)
  validation {
    condition     = length(var.fleets) > 0 && alltrue([for f in var.fleets : can(regex("^[a-z][a-z0-9-]{0,39}$", f))])
    error_message = "Name at least one fleet: 1 to 40 lowercase letters, digits and dashes each."
  }
}

variable "home_region" {
  description = "Region of the store, the control machine and the gateway."
  type        = string
}

variable "regions" {
  description = "Regions in which nodes may be rented, the home region among them. Zones: at least two of each."
  type = map(object({
    cidr     = string
    zones    = list(string)
    node_ami = string
  }))
  validation {
    condition     = alltrue([for r in values(var.regions) : can(cidrhost(r.cidr, 0)) && length(r.zones) >= 2])
    error_message = "Each region needs a CIDR block and at least two zones."
  }
  validation {
    condition     = length(distinct([for r in values(var.regions) : r.cidr])) == length(var.regions)
    error_message = "CIDR blocks must differ: the regions' networks are peered."
  }
}

variable "control_ami" {
  description = "Image of the control machine in the home region: Debian or Ubuntu with cloud-init and Python 3.11."
  type        = string
}

variable "control_instance_type" {
  description = "Runs the Prefect server, one flow worker and the Ray head."
  type        = string
  default     = "m7i.2xlarge"
}

variable "gateway_certificate_arn" {
  description = "ACM certificate of the gateway's public name, in the home region."
  type        = string
}

variable "gateway_ingress_cidrs" {
  description = "Who may reach the gateway on port 443. The only addresses from outside that any port is open to."
  type        = list(string)
  default     = ["0.0.0.0/0"]
}

variable "coral_version" {
  description = "Version of coral-serve that the control machine installs; the nodes' image brings its own."
  type        = string
}

variable "node_volume_gib" {
  description = "Root volume of a node; weights are kept on it unless the instance type has local NVMe."
  type        = number
  default     = 300
}

variable "log_retention_days" {
  description = "How long network flow logs and the gateway's access logs are kept."
  type        = number
  default     = 365
}
